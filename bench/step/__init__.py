"""`make bench-step`: a step of the target on each runtime, beside OpenVINO GenAI."""
