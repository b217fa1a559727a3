"""Commands that ask a stack: completions, conversations, answers from documents, a demonstration."""
