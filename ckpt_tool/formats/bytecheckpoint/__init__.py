"""ByteCheckpoint: sections of raw tensor bytes, each with a pickle that says where its boxes lie."""
