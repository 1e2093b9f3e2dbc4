package token

import (
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

// algorithm is the one that OpenID Connect Discovery 1.0, §3, requires of each issuer.
const algorithm = jose.RS256

// maxAge bounds the age of a returned token, however long it is valid.
const maxAge = 24 * time.Hour

// Signer signs tokens. It is safe for concurrent use.
type Signer struct {
	issuer string
	public jose.JSONWebKey
	signer jose.Signer

	mu     sync.Mutex
	issued map[request]answer
}

// Open reads the key in dir, and creates it the first time. Only root can read it. issuer is the
// issuer in the tokens, and the URL below which Discovery and JWKS are served.
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
	return &Signer{issuer: issuer, public: key.Public(), signer: signer, issued: map[request]answer{}}, nil
}

// request holds the claims of a token except its times.
type request struct {
	namespace, account, pod string
	uid                     types.UID
	audiences               string
	lifetime                time.Duration
}

type answer struct {
	token        string
	expires, due time.Time
}

// Token returns a token of a pod's service account, bound to the pod as in the TokenRequest API,
// and its expiry. The default audience is the issuer. The same token is returned until 80 % of its
// lifetime are over, at most for 24 hours, as a kubelet does. After a restart new tokens are
// signed; the old ones stay valid until they expire.
func (s *Signer) Token(pod *corev1.Pod, audiences []string, lifetime time.Duration) (token string, expires time.Time, err error) {
	if len(audiences) == 0 {
		audiences = []string{s.issuer}
	}
	r := request{pod.Namespace, account(pod), pod.Name, pod.UID, strings.Join(audiences, "\x00"), lifetime}
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	if a, ok := s.issued[r]; ok && now.Before(a.due) {
		return a.token, a.expires, nil
	}
	maps.DeleteFunc(s.issued, func(_ request, a answer) bool { return !now.Before(a.due) })
	a, err := s.sign(r, audiences, now)
	if err != nil {
		return "", time.Time{}, err
	}
	s.issued[r] = a
	return a.token, a.expires, nil
}

// account returns the pod's service account. "default" is the default of an API server.
func account(pod *corev1.Pod) string {
	if name := pod.Spec.ServiceAccountName; name != "" {
		return name
	}
	return "default"
}

func (s *Signer) sign(r request, audiences []string, now time.Time) (answer, error) {
	claims := jwt.Claims{
		Issuer:    s.issuer,
		Subject:   fmt.Sprintf("system:serviceaccount:%s:%s", r.namespace, r.account),
		Audience:  audiences,
		Expiry:    jwt.NewNumericDate(now.Add(r.lifetime)),
		NotBefore: jwt.NewNumericDate(now),
		IssuedAt:  jwt.NewNumericDate(now),
		ID:        uuid.NewString(),
	}
	bound := bindings{bound{
		Namespace:      r.namespace,
		Pod:            reference{r.pod, string(r.uid)},
		ServiceAccount: reference{r.account, s.accountUID(r)},
	}}
	token, err := jwt.Signed(s.signer).Claims(claims).Claims(bound).Serialize()
	due := now.Add(min(r.lifetime/5*4, maxAge))
	return answer{token, claims.Expiry.Time(), due}, err
}

// bindings are the private claims of Kubernetes.
type bindings struct {
	Kubernetes bound `json:"kubernetes.io"`
}

type bound struct {
	Namespace      string    `json:"namespace"`
	Pod            reference `json:"pod"`
	ServiceAccount reference `json:"serviceaccount"`
}

type reference struct {
	Name string `json:"name"`
	UID  string `json:"uid"`
}

// accountUID derives a stable UID from the account, because no manifest defines accounts.
func (s *Signer) accountUID(r request) string {
	return uuid.NewSHA1(uuid.NameSpaceURL, []byte(s.issuer+"/"+r.namespace+"/"+r.account)).String()
}
