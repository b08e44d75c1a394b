"""KV bookkeeping on the host: which pages and slots are free, who holds which, when they may be reused. No torch."""
