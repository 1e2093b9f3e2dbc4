package volume_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/volume"
)

// TestSecretsRedacted: no format shows the value of a secret.
func TestSecretsRedacted(t *testing.T) {
	const value = "hunter2"
	s := volume.NewSecrets(map[string]string{volume.SecretPassphrase: value})
	encoded, err := json.Marshal(map[string]any{"secrets": s})
	must(t, err)
	for _, text := range []string{
		fmt.Sprint(s), fmt.Sprintf("%v %+v %#v %s %q", s, s, s, s, s), fmt.Sprintf("%v %+v", &s, struct{ Secrets volume.Secrets }{s}), string(encoded), fmt.Sprint(s.MarshalLog()),
	} {
		if strings.Contains(text, value) {
			t.Errorf("%s contains the secret", text)
		}
	}
	_, err = volume.NewSecrets(map[string]string{"other": value}).Passphrase(volume.ID{}, volume.ParamNodeStageSecret)
	if err == nil || strings.Contains(err.Error(), value) {
		t.Errorf("got %v, want an error without the secret", err)
	}
}

// TestPassphrase: the passphrase must exist and must not be too long.
func TestPassphrase(t *testing.T) {
	for name, tc := range map[string]struct {
		secrets map[string]string
		want    string
	}{
		"one":               {map[string]string{"passphrase": "a\n"}, "a\n"},
		"none":              {nil, ""},
		"empty":             {map[string]string{"passphrase": ""}, ""},
		"longest":           {map[string]string{"passphrase": strings.Repeat("x", 4096)}, strings.Repeat("x", 4096)},
		"too long":          {map[string]string{"passphrase": strings.Repeat("x", 4097)}, ""},
		"previous too long": {map[string]string{"passphrase": "a", "previousPassphrase": strings.Repeat("x", 4097)}, ""},
	} {
		got, err := volume.NewSecrets(tc.secrets).Passphrase(volume.ID{}, volume.ParamNodeStageSecret)
		if string(got) != tc.want || (tc.want == "") != errors.Is(err, volume.ErrInvalid) {
			t.Errorf("%s: got %q, %v, want %q", name, got, err, tc.want)
		}
	}
}

// TestEncryptedRecord: a record with an encryption that no driver wrote is refused, and a request with another encryption
// does not match an existing volume.
func TestEncryptedRecord(t *testing.T) {
	for name, change := range map[string]func(*volume.Encryption){
		"type":    func(e *volume.Encryption) { e.Type = "luks1" },
		"cipher":  func(e *volume.Encryption) { e.Cipher = "" },
		"key":     func(e *volume.Encryption) { e.KeySize = 0 },
		"sectors": func(e *volume.Encryption) { e.SectorSize = 1024 },
		"offset":  func(e *volume.Encryption) { e.DataOffset = 1 << 50 },
		"none":    func(e *volume.Encryption) { *e = volume.Encryption{} },
	} {
		changed := *encryption
		change(&changed)
		v := volume.Volume{
			Version: 1, ID: id("loop", "ssd", "0a1b2c3d", "pvc-1"), CoName: "pvc-1", Capacity: 1 << 30, FSType: "xfs", SectorSize: 4096, Created: frozenTime,
			Encryption: &changed, Section: &section{"thin"},
		}
		b, err := v.MarshalRecord()
		must(t, err)
		if _, err := forms.ParseVolume(b); !errors.Is(err, volume.ErrDamaged) || !strings.Contains(err.Error(), "encryption") {
			t.Errorf("%s: got %v, want ErrDamaged because of the encryption", name, err)
		}
	}
	spec := func(encryption string) volume.Spec {
		return volume.Spec{CoName: "v", Capabilities: []volume.Capability{{Block: true}}, Parameters: volume.Parameters{Values: map[string]string{volume.ParamEncryption: encryption}}}
	}
	plain, encrypted := volume.Volume{CoName: "v", Block: true, Capacity: 1}, volume.Volume{CoName: "v", Block: true, Capacity: 1, Encryption: encryption}
	for _, tc := range []struct {
		v    volume.Volume
		spec volume.Spec
		want error
	}{
		{plain, spec(""), nil},
		{plain, spec("none"), nil},
		{plain, spec("luks2"), volume.ErrIncompatible},
		{encrypted, spec("luks2"), nil},
		{encrypted, spec(""), volume.ErrIncompatible},
	} {
		if err := tc.v.Satisfies(tc.spec); !errors.Is(err, tc.want) {
			t.Errorf("encryption %v, request %q: got %v, want %v", tc.v.Encryption, tc.spec.Parameters.Encryption(), err, tc.want)
		}
	}
	if got := encrypted.StorageSize(); got != 1+16<<20 {
		t.Errorf("got a storage of %d bytes, want the capacity and the header", got)
	}
}
