package token_test

import (
	"encoding/json"
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

// claims verifies a token as others do, by what is served.
func claims(t *testing.T, s *token.Signer, raw string) (standard jwt.Claims, own map[string]any) {
	t.Helper()
	b, err := s.JWKS()
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(b), `"d"`) {
		t.Errorf("the key set has the private key: %s", b)
	}
	var keys jose.JSONWebKeySet
	if err := json.Unmarshal(b, &keys); err != nil {
		t.Fatal(err)
	}
	parsed, err := jwt.ParseSigned(raw, []jose.SignatureAlgorithm{jose.RS256})
	if err != nil {
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
		{"own", "clerk", []string{"vault", "bank"}, "system:serviceaccount:shop:clerk", jwt.Audience{"vault", "bank"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			before := time.Now().Truncate(time.Second)
			raw, expires := signed(t, s, pod(tc.account), tc.audiences, time.Hour)
			got, own := claims(t, s, raw)
			if got.Subject != tc.subject || !slices.Equal(got.Audience, tc.wantAudiences) || got.Issuer != issuer || got.ID == "" {
				t.Errorf("%+v", got)
			}
			if got.IssuedAt.Time().Before(before) || *got.NotBefore != *got.IssuedAt || !got.Expiry.Time().Equal(got.IssuedAt.Time().Add(time.Hour)) || !got.Expiry.Time().Equal(expires) {
				t.Errorf("times %+v, said to expire at %s", got, expires)
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

// TestRefresh: a token is handed out until 80 % of its life, and for a day at most.
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
					t.Error("another one too early")
				}
				time.Sleep(time.Nanosecond)
				if again, expires := signed(t, s, pod(""), nil, tc.lifetime); again == first || time.Until(expires) != tc.lifetime {
					t.Errorf("the same one, or for %s", time.Until(expires))
				}
			})
		})
	}
}

// TestNotAnothers: what a token says of one is not handed to another.
func TestNotAnothers(t *testing.T) {
	s := open(t, t.TempDir())
	first, _ := signed(t, s, pod(""), []string{"a", "b"}, time.Hour)
	again := pod("")
	again.UID = "4712"
	for name, get := range map[string]func() (string, time.Time, error){
		"another account":  func() (string, time.Time, error) { return s.Token(pod("clerk"), []string{"a", "b"}, time.Hour) },
		"the next pod":     func() (string, time.Time, error) { return s.Token(again, []string{"a", "b"}, time.Hour) },
		"another audience": func() (string, time.Time, error) { return s.Token(pod(""), []string{"a"}, time.Hour) },
		"another lifetime": func() (string, time.Time, error) { return s.Token(pod(""), []string{"a", "b"}, 2*time.Hour) },
	} {
		if raw, _, err := get(); err != nil || raw == first {
			t.Errorf("%s has the same token, or %v", name, err)
		}
	}
}

// TestKeyStays: after a restart tokens that were signed before are good, and accounts are
// the same.
func TestKeyStays(t *testing.T) {
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
		t.Errorf("account %v, then %v", uid(before), uid(after))
	}
	info, err := os.Stat(filepath.Join(dir, keyFile))
	if err != nil || info.Mode() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}
}

// TestBadKey: what cannot be a good key is neither used nor replaced.
func TestBadKey(t *testing.T) {
	key := func(t *testing.T, dir string) []byte {
		open(t, dir)
		b, err := os.ReadFile(filepath.Join(dir, keyFile))
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	for _, tc := range []struct {
		name  string
		spoil func(t *testing.T, path string, key []byte) error
	}{
		{"torn", func(_ *testing.T, path string, key []byte) error { return os.WriteFile(path, key[:100], 0o600) }},
		{"empty", func(_ *testing.T, path string, _ []byte) error { return os.WriteFile(path, nil, 0o600) }},
		{"open to others", func(_ *testing.T, path string, _ []byte) error { return os.Chmod(path, 0o640) }},
		{"a link", func(t *testing.T, path string, key []byte) error {
			other := filepath.Join(t.TempDir(), "key")
			if err := os.WriteFile(other, key, 0o600); err != nil {
				return err
			}
			if err := os.Remove(path); err != nil {
				return err
			}
			return os.Symlink(other, path)
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, keyFile)
			if err := tc.spoil(t, path, key(t, dir)); err != nil {
				t.Fatal(err)
			}
			before, _ := os.ReadFile(path)
			_, err := token.Open(dir, issuer)
			if err == nil || !strings.Contains(err.Error(), path) || strings.Contains(err.Error(), "BEGIN") {
				t.Errorf("%v", err)
			}
			if after, _ := os.ReadFile(path); string(after) != string(before) {
				t.Error("it was replaced")
			}
		})
	}
}

func TestBadIssuer(t *testing.T) {
	for _, bad := range []string{"", "node-1", "https://", "https://node-1?a=b", "https://node-1#a", "://"} {
		if _, err := token.Open(t.TempDir(), bad); err == nil {
			t.Errorf("%q is an issuer", bad)
		}
	}
}

func TestDiscovery(t *testing.T) {
	s, err := token.Open(t.TempDir(), issuer+"/")
	if err != nil {
		t.Fatal(err)
	}
	b, err := s.Discovery()
	if err != nil {
		t.Fatal(err)
	}
	var got struct {
		Issuer     string   `json:"issuer"`
		JWKS       string   `json:"jwks_uri"`
		Algorithms []string `json:"id_token_signing_alg_values_supported"`
	}
	if err := json.Unmarshal(b, &got); err != nil {
		t.Fatal(err)
	}
	if got.Issuer != issuer+"/" || got.JWKS != issuer+token.JWKSPath || !slices.Contains(got.Algorithms, "RS256") {
		t.Errorf("%s", b)
	}
}
