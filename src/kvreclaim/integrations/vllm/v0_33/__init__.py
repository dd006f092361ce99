"""What touches the private API of vLLM 0.33 and is not as in 0.32."""
