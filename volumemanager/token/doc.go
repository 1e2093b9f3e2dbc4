// Package token signs service account tokens with a key of this machine, as a Kubernetes API
// server does with the cluster's key. It returns what others need to verify them: the public key
// and the OpenID Connect discovery document.
//
// It does not serve HTTP and does not know the accounts.
package token
