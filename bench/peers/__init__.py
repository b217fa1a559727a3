"""Other engines, each as its users run it, in a process of its own.

answering          how such a process is asked: a line of JSON for each request and each answer
transformers_peer  transformers, plain and assisted; it also encodes prompts and scores texts
openvino_peer      OpenVINO GenAI, plain, with a draft model, with prompt lookup
openvino_rows      its rows, as the measuring process sees them
stateless          a Hugging Face model as OpenVINO takes it in
llamacpp_peer      llama.cpp's server on a GGUF file (`make setup-peers`)
openvino_gguf_peer OpenVINO GenAI on a GGUF file, likewise
"""
