"""The counterparts of published tables that papers.py makes."""
