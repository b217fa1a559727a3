"""`make soak`: sessions by the dozen while their services are killed, stopped and cut off. `make soak-load`: by the
thousand, with speed, memory and whether that grows.

run        make soak; load: make soak-load
rig        the processes, and a line between any two of them
jobs       whose texts, and what each session asks for, drawn from a seed
reader     one session as its client sees it; checks: what of that is wrong
monkey     kills, stops, cuts; neighbour: asks for what must hurt nobody, fills and cuts a log in a file
report     the figures of a soak; load_report: of a load, with what processes hold, and whether it grows
weighing   has them tell what they hold
"""
