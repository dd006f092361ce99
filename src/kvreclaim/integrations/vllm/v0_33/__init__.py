"""Code for the private API of vLLM 0.33 that differs from 0.32."""
