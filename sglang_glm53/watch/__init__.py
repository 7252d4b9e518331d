"""The watchdog: what a running server shows when a cache, a draft or a kernel is broken.

options.py reads GLM53_WATCH. request.py judges one request's tokens (plain Python). alarms.py
counts, logs and aborts. logits.py looks for NaN and infinity. slots.py checks cache slots in debug
mode. hooks.py sets it all, where SGLang runs a pass and where it reads a pass's result. probe.py
asks a server with speculation one prompt before it is ready.
"""
