"""Files and folders that are nowhere stored as such: decoded parts, archives, zeros, folders of several stores."""
