"""Triton as vLLM looks for it when it is imported: usable, under its interpreter. To be imported first."""

import interpreted

interpreted.use_v2_runner()
