"""Other engines, each as its users run it, in a process of its own; all are asked alike.

library           starts one, and prepares what it reads
answering         how such a process is asked: a line of JSON for each request and each answer
transformers_peer transformers: plain, assisted, a static batch, continuous batching
openvino_peer     OpenVINO GenAI on a GGUF file or what openvino_export writes: plain, a draft model, prompt lookup
llamacpp_peer     llama.cpp's server on a GGUF file
forward_peer      our own runtime without a server
"""
