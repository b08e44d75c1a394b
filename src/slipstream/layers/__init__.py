"""The pieces decoders are made of. Inference only: plain tensors, no autograd, no knowledge of requests or pages."""
