// Package token signs service-account tokens with a key of this machine's own, as a
// Kubernetes API server does with the cluster's, and says what others verify them by:
// the public key, and OpenID Connect's discovery document.
//
// Nothing here serves HTTP or knows which accounts there are.
package token
