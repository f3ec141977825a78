"""The keys of strategies whose processes talk to each other through servers."""

from anp_jax.config import keys

KEYS = {
  'bind': keys.text(
    '', "interface or address that servers listen on; '': the host's own", resumable=True
  ),
  'tls_certificate': keys.text(
    '', "PEM file with the certificate of all servers; '': no encryption", resumable=True
  ),
  'tls_key': keys.text('', "PEM file with the certificate's private key", resumable=True),
}
