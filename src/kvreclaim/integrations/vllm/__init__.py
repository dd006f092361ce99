"""Block-freeing compression inside vLLM, which finds entry/plugin.py by its entry point.

Rooms by process, lowest first: settings, refusals, scheduler, worker, live (the page), v0_32 and v0_33 (the
private names of vLLM), entry (what vLLM loads by name).
"""
