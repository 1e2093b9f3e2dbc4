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

// claims verifies a token with the served keys, as other programs do.
func claims(t *testing.T, s *token.Signer, raw string) (standard jwt.Claims, own map[string]any) {
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
	if err := parsed.Claims(keys, &standard, &own); err != nil {
		t.Fatal(err)
	}
	return standard, own
}

func signed(t *testing.T, s *token.Signer, pod *corev1.Pod, audiences []string, lifetime time.Duration) (string, time.Time) {
	t.Helper()
	raw, expires, err := s.Token(pod, audiences, lifetime)
	if err != nil {
		t.Fatal(err)
	}
	return raw, expires
}

func TestClaims(t *testing.T) {
	s := open(t, t.TempDir())
	for _, tc := range []struct {
		name, account string
		audiences     []string
		subject       string
		wantAudiences jwt.Audience
	}{
		{"default account and audience", "", nil, "system:serviceaccount:shop:default", jwt.Audience{issuer}},
		{"given account and audiences", "clerk", []string{"vault", "bank"}, "system:serviceaccount:shop:clerk", jwt.Audience{"vault", "bank"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			before := time.Now().Truncate(time.Second)
			raw, expires := signed(t, s, pod(tc.account), tc.audiences, time.Hour)
			got, own := claims(t, s, raw)
			if got.Subject != tc.subject || !slices.Equal(got.Audience, tc.wantAudiences) || got.Issuer != issuer || got.ID == "" {
				t.Errorf("%+v", got)
			}
			if got.IssuedAt.Time().Before(before) || *got.NotBefore != *got.IssuedAt || !got.Expiry.Time().Equal(got.IssuedAt.Time().Add(time.Hour)) || !got.Expiry.Time().Equal(expires) {
				t.Errorf("times %+v, the returned expiry is %s", got, expires)
			}
			bound, _ := own["kubernetes.io"].(map[string]any)
			onPod, _ := bound["pod"].(map[string]any)
			onAccount, _ := bound["serviceaccount"].(map[string]any)
			if bound["namespace"] != "shop" || onPod["name"] != "web" || onPod["uid"] != "4711" || !strings.HasSuffix(tc.subject, ":"+onAccount["name"].(string)) || onAccount["uid"] == "" {
				t.Errorf("bound to %v", bound)
			}
		})
	}
}

// TestRefresh: the same token is returned until 80 % of its lifetime are over, at most for 24 hours.
func TestRefresh(t *testing.T) {
	for _, tc := range []struct {
		lifetime, until time.Duration
	}{
		{10 * time.Minute, 8 * time.Minute},
		{time.Hour, 48 * time.Minute},
		{365 * 24 * time.Hour, 24 * time.Hour},
	} {
		t.Run(tc.lifetime.String(), func(t *testing.T) {
			dir := t.TempDir()
			synctest.Test(t, func(t *testing.T) {
				s := open(t, dir)
				first, _ := signed(t, s, pod(""), nil, tc.lifetime)
				time.Sleep(tc.until - time.Nanosecond)
				if again, _ := signed(t, s, pod(""), nil, tc.lifetime); again != first {
					t.Error("a new token is returned too early")
				}
				time.Sleep(time.Nanosecond)
				if again, expires := signed(t, s, pod(""), nil, tc.lifetime); again == first || time.Until(expires) != tc.lifetime {
					t.Errorf("the same token is returned, or one that expires in %s", time.Until(expires))
				}
			})
		})
	}
}

// TestRequestsDiffer: a token is returned only for the account, pod, audiences and lifetime for which it
// was signed.
func TestRequestsDiffer(t *testing.T) {
	s := open(t, t.TempDir())
	first, _ := signed(t, s, pod(""), []string{"a", "b"}, time.Hour)
	next := pod("")
	next.UID = "4712"
	for name, get := range map[string]func() (string, time.Time, error){
		"another account":  func() (string, time.Time, error) { return s.Token(pod("clerk"), []string{"a", "b"}, time.Hour) },
		"the next pod":     func() (string, time.Time, error) { return s.Token(next, []string{"a", "b"}, time.Hour) },
		"another audience": func() (string, time.Time, error) { return s.Token(pod(""), []string{"a"}, time.Hour) },
		"another lifetime": func() (string, time.Time, error) { return s.Token(pod(""), []string{"a", "b"}, 2*time.Hour) },
	} {
		if raw, _, err := get(); err != nil || raw == first {
			t.Errorf("%s: the same token is returned, or error %v", name, err)
		}
	}
}

// TestRestart: after a restart, earlier tokens are valid, and the UIDs of accounts are the same.
func TestRestart(t *testing.T) {
	dir := t.TempDir()
	raw, _ := signed(t, open(t, dir), pod(""), nil, time.Hour)
	s := open(t, dir)
	_, before := claims(t, s, raw)
	raw, _ = signed(t, s, pod(""), nil, time.Hour)
	_, after := claims(t, s, raw)
	uid := func(own map[string]any) any {
		return own["kubernetes.io"].(map[string]any)["serviceaccount"].(map[string]any)["uid"]
	}
	if uid(before) != uid(after) {
		t.Errorf("UID of the account: got %v, want %v", uid(after), uid(before))
	}
	info, err := os.Stat(filepath.Join(dir, keyFile))
	if err != nil || info.Mode() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}
}

// TestInvalidKey: an invalid or readable key is neither used nor replaced.
func TestInvalidKey(t *testing.T) {
	for _, tc := range []struct {
		name  string
		spoil func(t *testing.T, path string, key []byte) error
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
			if err := errors.Join(err, tc.spoil(t, path, key)); err != nil {
				t.Fatal(err)
			}
			before, _ := os.ReadFile(path)
			_, err = token.Open(dir, issuer)
			if err == nil || !strings.Contains(err.Error(), path) || strings.Contains(err.Error(), "BEGIN") {
				t.Errorf("%v", err)
			}
			if after, _ := os.ReadFile(path); string(after) != string(before) {
				t.Error("the key was replaced")
			}
		})
	}
}

func TestInvalidIssuer(t *testing.T) {
	for _, invalid := range []string{"", "node-1", "https://", "https://node-1?a=b", "https://node-1#a", "://"} {
		if _, err := token.Open(t.TempDir(), invalid); err == nil {
			t.Errorf("issuer %q is accepted", invalid)
		}
	}
}

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
		t.Errorf("%s", b)
	}
}
