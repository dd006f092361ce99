"""Models with packed weights in their linear layers: AWQ, GPTQ, compressed-tensors, bitsandbytes, GGUF.

source = checkpoint_source(directory, settings) or GgufSource(file)
model = build(config, dtype, source)    creates modules on the meta device and fills them weight by weight
"""
