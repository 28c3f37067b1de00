"""Parts that the integrations of training frameworks share. They import no framework."""
