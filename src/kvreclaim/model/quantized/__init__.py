"""Models whose linear layers keep their weights packed: AWQ, GPTQ, compressed-tensors, bitsandbytes, GGUF.

source = checkpoint_source(directory, settings) or GgufSource(file)
model = build(config, dtype, source)    modules without memory, filled one weight at a time
"""
