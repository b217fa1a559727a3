"""llama.cpp computes the forwards of GGUF files: `runner` calls it, `sequences` says where the rows of a slot lie."""
