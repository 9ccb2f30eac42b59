"""What torch.save wrote as a whole: one file, or the sharded ``pytorch_model.bin`` of Hugging Face."""
