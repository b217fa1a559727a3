"""Tool calls and reasoning in a model's text, as each family of models writes them.

parser   the text as it comes, cut into content, reasoning and calls
formats  how families write calls, and what a chat template tells of its family
readers  one call, a character at a time: as JSON, behind its name, as Python, in tags
values   what stands in calls
grammar  the texts that may have calls, for a constraint
"""
