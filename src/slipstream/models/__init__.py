"""Model types: one file each on shared layers. Knows tokens and attention, not requests, slots or drafts."""
