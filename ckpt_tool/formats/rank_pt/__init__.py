"""One torch.save file per rank: verl, accelerate, FSDP1, and whatever else differs in a rank number only."""
