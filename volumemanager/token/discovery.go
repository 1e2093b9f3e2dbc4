package token

import (
	"encoding/json"
	"strings"

	"github.com/go-jose/go-jose/v4"
)

// The paths of Discovery and JWKS below the issuer's URL (OpenID Connect Discovery 1.0, §4; the
// second as in Kubernetes).
const (
	DiscoveryPath = "/.well-known/openid-configuration"
	JWKSPath      = "/openid/v1/jwks"
)

// Discovery returns the document of OpenID Connect Discovery 1.0, §3, as JSON.
func (s *Signer) Discovery() ([]byte, error) {
	return json.Marshal(map[string]any{
		"issuer":                                s.issuer,
		"jwks_uri":                              strings.TrimSuffix(s.issuer, "/") + JWKSPath,
		"response_types_supported":              []string{"id_token"},
		"subject_types_supported":               []string{"public"},
		"id_token_signing_alg_values_supported": []jose.SignatureAlgorithm{algorithm},
	})
}

// JWKS returns the public key as a JSON Web Key Set (RFC 7517, §5).
func (s *Signer) JWKS() ([]byte, error) {
	return json.Marshal(jose.JSONWebKeySet{Keys: []jose.JSONWebKey{s.public}})
}
