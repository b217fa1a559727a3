"""`make bench`, `make bench-box`: this system beside transformers and OpenVINO GenAI, one session at a time.

run       the command: python -m bench.main.run
settings  what to measure, and the command line that says so
measure   one measurement from start to end
box       the rows of `--box`: one process, several, and the forward alone
gaps      where time goes between forwards, and from a forward to the client
judged    what is needed, and whether it holds
results   everything that was found, and bench/results/main.json
report    the table
plot      bench/results/main.png
"""
