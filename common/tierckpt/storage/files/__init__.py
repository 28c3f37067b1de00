"""Files: durable writes, locks, mapped and unbuffered files."""
