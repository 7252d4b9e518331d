"""The KV cache: where its bytes lie (page.py, mode.py: pure Python), and the pool (pool.py)."""
