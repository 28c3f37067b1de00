"""Teams of rank processes that train on command and time themselves."""
