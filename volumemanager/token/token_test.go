package token_test

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/trivet-csi/trivet/volumemanager/token"
)

const (
	issuer  = "https://node-1.example"
	keyFile = "service-account.key"
)

func open(t *testing.T, dir string) *token.Signer {
	t.Helper()
	s, err := token.Open(dir, issuer)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func pod(account string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web", UID: "4711"},
		Spec:       corev1.PodSpec{ServiceAccountName: account},
	}
}

// verify verifies a token with the signer's public keys, as other programs do, and returns the
// registered claims and all claims of the token.
func verify(t *testing.T, s *token.Signer, raw string) (standard jwt.Claims, all map[string]any) {
	t.Helper()
	b, err := s.JWKS()
	if strings.Contains(string(b), `"d"`) {
		t.Errorf("the key set contains the private key: %s", b)
	}
	var keys jose.JSONWebKeySet
	parsed, parseErr := jwt.ParseSigned(raw, []jose.SignatureAlgorithm{jose.RS256})
	if err := errors.Join(err, json.Unmarshal(b, &keys), parseErr); err != nil {
		t.Fatal(err)
	}
	if err := parsed.Claims(keys, &standard, &all); err != nil {
		t.Fatal(err)
	}
	return standard, all
}

func newToken(t *testing.T, s *token.Signer, pod *corev1.Pod, audiences []string, lifetime time.Duration) (string, time.Time) {
	t.Helper()
	raw, expires, err := s.Token(pod, audiences, lifetime)
	if err != nil {
		t.Fatal(err)
	}
	return raw, expires
}

// TestClaims: a token has the claims of a Kubernetes token that is bound to a pod.
func TestClaims(t *testing.T) {
	s := open(t, t.TempDir())
	for _, tc := range []struct {
		name, account string
		audiences     []string
		wantSubject   string
		wantAudiences jwt.Audience
	}{
		{"default account and audience", "", nil, "system:serviceaccount:shop:default", jwt.Audience{issuer}},
		{"given account and audiences", "clerk", []string{"vault", "bank"}, "system:serviceaccount:shop:clerk", jwt.Audience{"vault", "bank"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			before := time.Now().Truncate(time.Second)
			raw, expires := newToken(t, s, pod(tc.account), tc.audiences, time.Hour)
			got, all := verify(t, s, raw)
			if got.Subject != tc.wantSubject || !slices.Equal(got.Audience, tc.wantAudiences) || got.Issuer != issuer || got.ID == "" {
				t.Errorf("got claims %+v, want subject %s, audience %v, issuer %s and an ID", got, tc.wantSubject, tc.wantAudiences, issuer)
			}
			if got.IssuedAt.Time().Before(before) || *got.NotBefore != *got.IssuedAt || !got.Expiry.Time().Equal(got.IssuedAt.Time().Add(time.Hour)) || !got.Expiry.Time().Equal(expires) {
				t.Errorf("got claims %+v, want a token that is valid from now for one hour, until the returned expiry %s", got, expires)
			}
			bound, _ := all["kubernetes.io"].(map[string]any)
			boundPod, _ := bound["pod"].(map[string]any)
			account, _ := bound["serviceaccount"].(map[string]any)
			if bound["namespace"] != "shop" || boundPod["name"] != "web" || boundPod["uid"] != "4711" || !strings.HasSuffix(tc.wantSubject, ":"+account["name"].(string)) || account["uid"] == "" {
				t.Errorf("claim kubernetes.io: got %v, want namespace shop, pod web with UID 4711, and the service account", bound)
			}
		})
	}
}

// TestRefresh: the same token is returned until 80 % of its lifetime are over, at most for 24 hours.
func TestRefresh(t *testing.T) {
	for _, tc := range []struct {
		lifetime, wantRenewal time.Duration
	}{
		{10 * time.Minute, 8 * time.Minute},
		{time.Hour, 48 * time.Minute},
		{365 * 24 * time.Hour, 24 * time.Hour},
	} {
		t.Run(tc.lifetime.String(), func(t *testing.T) {
			dir := t.TempDir()
			synctest.Test(t, func(t *testing.T) {
				s := open(t, dir)
				first, _ := newToken(t, s, pod(""), nil, tc.lifetime)
				time.Sleep(tc.wantRenewal - time.Nanosecond)
				if again, _ := newToken(t, s, pod(""), nil, tc.lifetime); again != first {
					t.Errorf("a new token was returned before %v", tc.wantRenewal)
				}
				time.Sleep(time.Nanosecond)
				if again, expires := newToken(t, s, pod(""), nil, tc.lifetime); again == first || time.Until(expires) != tc.lifetime {
					t.Errorf("after %v: got the same token: %t, expiry in %s; want a new token that expires in %s", tc.wantRenewal, again == first, time.Until(expires), tc.lifetime)
				}
			})
		})
	}
}

// TestRequestsDiffer: a token is returned only for the account, pod, audiences and lifetime for which it
// was signed.
func TestRequestsDiffer(t *testing.T) {
	s := open(t, t.TempDir())
	first, _ := newToken(t, s, pod(""), []string{"a", "b"}, time.Hour)
	next := pod("")
	next.UID = "4712"
	for name, get := range map[string]func() (string, time.Time, error){
		"other account":  func() (string, time.Time, error) { return s.Token(pod("clerk"), []string{"a", "b"}, time.Hour) },
		"other pod UID":  func() (string, time.Time, error) { return s.Token(next, []string{"a", "b"}, time.Hour) },
		"other audience": func() (string, time.Time, error) { return s.Token(pod(""), []string{"a"}, time.Hour) },
		"other lifetime": func() (string, time.Time, error) { return s.Token(pod(""), []string{"a", "b"}, 2*time.Hour) },
	} {
		if raw, _, err := get(); err != nil || raw == first {
			t.Errorf("%s: got the same token: %t, error %v; want another token", name, raw == first, err)
		}
	}
}

// TestRestart: after a restart, earlier tokens are still valid, and service accounts have the same UIDs.
func TestRestart(t *testing.T) {
	dir := t.TempDir()
	raw, _ := newToken(t, open(t, dir), pod(""), nil, time.Hour)
	s := open(t, dir)
	_, before := verify(t, s, raw)
	raw, _ = newToken(t, s, pod(""), nil, time.Hour)
	_, after := verify(t, s, raw)
	uid := func(claims map[string]any) any {
		return claims["kubernetes.io"].(map[string]any)["serviceaccount"].(map[string]any)["uid"]
	}
	if uid(before) != uid(after) {
		t.Errorf("UID of the account after the restart: got %v, want %v as before", uid(after), uid(before))
	}
	info, err := os.Stat(filepath.Join(dir, keyFile))
	if err != nil || info.Mode() != 0o600 {
		t.Errorf("key file: got %v, error %v; want mode -rw-------", info, err)
	}
}

// TestInvalidKey: a key that is invalid, or that other users can read, is neither used nor replaced.
func TestInvalidKey(t *testing.T) {
	for _, tc := range []struct {
		name   string
		damage func(t *testing.T, path string, key []byte) error
	}{
		{"truncated", func(_ *testing.T, path string, key []byte) error { return os.WriteFile(path, key[:100], 0o600) }},
		{"empty", func(_ *testing.T, path string, _ []byte) error { return os.WriteFile(path, nil, 0o600) }},
		{"readable by other users", func(_ *testing.T, path string, _ []byte) error { return os.Chmod(path, 0o640) }},
		{"symbolic link", func(t *testing.T, path string, key []byte) error {
			other := filepath.Join(t.TempDir(), "key")
			return errors.Join(os.WriteFile(other, key, 0o600), os.Remove(path), os.Symlink(other, path))
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, keyFile)
			open(t, dir)
			key, err := os.ReadFile(path)
			if err := errors.Join(err, tc.damage(t, path, key)); err != nil {
				t.Fatal(err)
			}
			damaged, _ := os.ReadFile(path)
			_, err = token.Open(dir, issuer)
			if err == nil || !strings.Contains(err.Error(), path) || strings.Contains(err.Error(), "BEGIN") {
				t.Errorf("got error %v, want one with the path of the key and without its content", err)
			}
			if after, _ := os.ReadFile(path); string(after) != string(damaged) {
				t.Error("Open replaced the key")
			}
		})
	}
}

// TestInvalidIssuer: Open refuses an issuer that is not a URL below which documents can be served.
func TestInvalidIssuer(t *testing.T) {
	for _, invalid := range []string{"", "node-1", "https://", "https://node-1?a=b", "https://node-1#a", "://"} {
		if _, err := token.Open(t.TempDir(), invalid); err == nil {
			t.Errorf("issuer %q: got no error", invalid)
		}
	}
}

// TestDiscovery: the discovery document names the issuer, the URL of the public keys and the algorithm.
func TestDiscovery(t *testing.T) {
	s, err := token.Open(t.TempDir(), issuer+"/")
	if err != nil {
		t.Fatal(err)
	}
	var got struct {
		Issuer     string   `json:"issuer"`
		JWKS       string   `json:"jwks_uri"`
		Algorithms []string `json:"id_token_signing_alg_values_supported"`
	}
	b, err := s.Discovery()
	if err := errors.Join(err, json.Unmarshal(b, &got)); err != nil {
		t.Fatal(err)
	}
	if got.Issuer != issuer+"/" || got.JWKS != issuer+token.JWKSPath || !slices.Contains(got.Algorithms, "RS256") {
		t.Errorf("got %s, want issuer %s/, jwks_uri %s and algorithm RS256", b, issuer, issuer+token.JWKSPath)
	}
}
