// Package token signs service account tokens with a key of this machine, as a Kubernetes API
// server does with the cluster's key. It returns the data with which other programs verify tokens: the
// public key and the OpenID Connect discovery document. It does not serve HTTP.
package token

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"
	"github.com/google/uuid"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// algorithm is the signing algorithm that each issuer must support (OpenID Connect Discovery 1.0, §3).
const algorithm = jose.RS256

// maxAge is the maximum age of a returned token. The token may be valid for longer.
const maxAge = 24 * time.Hour

// Signer signs tokens. It is safe for concurrent use.
type Signer struct {
	issuer string
	public jose.JSONWebKey
	signer jose.Signer

	mu     sync.Mutex
	issued map[request]issuedToken
}

// Open reads the key in dir, and creates a missing one. Only root can read the key. issuer is the
// issuer in the tokens, and the URL below which the caller serves Discovery and JWKS.
func Open(dir, issuer string) (*Signer, error) {
	u, err := url.Parse(issuer)
	if err != nil || u.Scheme == "" || u.Host == "" || u.RawQuery != "" || u.Fragment != "" {
		return nil, fmt.Errorf("issuer of service-account tokens %q: it must be a URL with scheme and host, without query and fragment, such as https://HOST", issuer)
	}
	key, err := openKey(dir)
	if err != nil {
		return nil, err
	}
	signer, err := jose.NewSigner(jose.SigningKey{Algorithm: algorithm, Key: key}, nil)
	if err != nil {
		return nil, err
	}
	return &Signer{issuer: issuer, public: key.Public(), signer: signer, issued: map[request]issuedToken{}}, nil
}

// request identifies tokens that differ only in their times and IDs.
type request struct {
	namespace, account, pod string
	// uid is the UID of the pod.
	uid types.UID
	// audiences are separated by zero bytes.
	audiences string
	lifetime  time.Duration
}

// issuedToken is a token that is returned again until renewAt.
type issuedToken struct {
	token            string
	expires, renewAt time.Time
}

// Token returns a token of a pod's service account, bound to the pod as in the TokenRequest API, and
// the token's expiry. The default audience is the issuer. Like a kubelet, Token returns the same token
// until 80 % of its lifetime are over, at most for 24 hours. After a restart it signs new tokens; the
// old ones stay valid until they expire.
func (s *Signer) Token(pod *corev1.Pod, audiences []string, lifetime time.Duration) (token string, expires time.Time, err error) {
	if len(audiences) == 0 {
		audiences = []string{s.issuer}
	}
	account := cmp.Or(pod.Spec.ServiceAccountName, "default") // the default of an API server
	r := request{pod.Namespace, account, pod.Name, pod.UID, strings.Join(audiences, "\x00"), lifetime}
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	if t, ok := s.issued[r]; ok && now.Before(t.renewAt) {
		return t.token, t.expires, nil
	}
	maps.DeleteFunc(s.issued, func(_ request, t issuedToken) bool { return !now.Before(t.renewAt) })
	t, err := s.sign(r, audiences, now)
	if err != nil {
		return "", time.Time{}, err
	}
	s.issued[r] = t
	return t.token, t.expires, nil
}

// sign signs a token that is valid from now.
func (s *Signer) sign(r request, audiences []string, now time.Time) (issuedToken, error) {
	claims := jwt.Claims{
		Issuer:    s.issuer,
		Subject:   fmt.Sprintf("system:serviceaccount:%s:%s", r.namespace, r.account),
		Audience:  audiences,
		Expiry:    jwt.NewNumericDate(now.Add(r.lifetime)),
		NotBefore: jwt.NewNumericDate(now),
		IssuedAt:  jwt.NewNumericDate(now),
		ID:        uuid.NewString(),
	}
	bound := map[string]any{"kubernetes.io": map[string]any{ // the private claims of Kubernetes
		"namespace":      r.namespace,
		"pod":            reference{r.pod, string(r.uid)},
		"serviceaccount": reference{r.account, s.accountUID(r)},
	}}
	token, err := jwt.Signed(s.signer).Claims(claims).Claims(bound).Serialize()
	renewAt := now.Add(min(r.lifetime/5*4, maxAge))
	return issuedToken{token, claims.Expiry.Time(), renewAt}, err
}

// reference is a reference to an object in the private claims of Kubernetes.
type reference struct {
	Name string `json:"name"`
	UID  string `json:"uid"`
}

// accountUID derives a stable UID from the account's name, because no manifest defines accounts.
func (s *Signer) accountUID(r request) string {
	return uuid.NewSHA1(uuid.NameSpaceURL, []byte(s.issuer+"/"+r.namespace+"/"+r.account)).String()
}

// The paths of Discovery (OpenID Connect Discovery 1.0, §4) and of JWKS (as in Kubernetes) below the
// issuer's URL.
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
