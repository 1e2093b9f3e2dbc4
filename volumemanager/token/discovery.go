package token

import (
	"encoding/json"
	"strings"

	"github.com/go-jose/go-jose/v4"
)

// Where Discovery and JWKS are served, below the issuer's URL: OpenID Connect Discovery
// 1.0, §4, and as Kubernetes has it.
const (
	DiscoveryPath = "/.well-known/openid-configuration"
	JWKSPath      = "/openid/v1/jwks"
)

// Discovery is the document of OpenID Connect Discovery 1.0, §3, as JSON.
func (s *Signer) Discovery() ([]byte, error) {
	return json.Marshal(map[string]any{
		"issuer":                                s.issuer,
		"jwks_uri":                              strings.TrimSuffix(s.issuer, "/") + JWKSPath,
		"response_types_supported":              []string{"id_token"},
		"subject_types_supported":               []string{"public"},
		"id_token_signing_alg_values_supported": []jose.SignatureAlgorithm{algorithm},
	})
}

// JWKS is the public key as a JSON Web Key Set (RFC 7517, §5).
func (s *Signer) JWKS() ([]byte, error) {
	return json.Marshal(jose.JSONWebKeySet{Keys: []jose.JSONWebKey{s.public}})
}
