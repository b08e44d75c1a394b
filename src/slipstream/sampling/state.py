"""Sampling parameters of every slot on the device, and the rows of one step gathered from them."""
