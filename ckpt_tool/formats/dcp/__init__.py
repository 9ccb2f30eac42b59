"""``torch.distributed.checkpoint``: a pickle that lists boxes, and files of small zips that hold them."""
