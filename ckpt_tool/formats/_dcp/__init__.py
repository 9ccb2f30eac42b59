"""The files of ``torch.distributed.checkpoint``, shared by the formats that are made of them."""
