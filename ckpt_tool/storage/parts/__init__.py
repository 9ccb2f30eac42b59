"""Places that take files in parts, as S3 and HDFS do: uploads, and a target that goes on after it was killed."""
