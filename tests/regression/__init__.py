"""What the miniature knows, asked through the real server under every condition; planted faults."""
