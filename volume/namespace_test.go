package volume_test

import (
	"errors"
	"testing"

	"github.com/trivet-csi/trivet/volume"
)

// TestCheckNamespace: only pods of the recorded namespace may use a volume.
func TestCheckNamespace(t *testing.T) {
	for _, tc := range []struct {
		recorded string
		want     error
	}{{"shop", nil}, {"other", volume.ErrPrecondition}, {"", volume.ErrPrecondition}} {
		if err := (volume.Volume{Namespace: tc.recorded}).CheckNamespace("shop"); !errors.Is(err, tc.want) || (err == nil) != (tc.want == nil) {
			t.Errorf("recorded namespace %q: got %v, want %v", tc.recorded, err, tc.want)
		}
	}
}

// TestNamespaceChange: a namespace is changed only if the request is valid and the recorded namespace is the expected
// one.
func TestNamespaceChange(t *testing.T) {
	const to, before = volume.ParamNamespace, volume.ParamNamespaceBefore
	for _, tc := range []struct {
		name     string
		in       map[string]string
		recorded string
		want     error
	}{
		{"from any namespace", map[string]string{to: "shop"}, "other", nil},
		{"from no namespace", map[string]string{to: "shop", before: ""}, "", nil},
		{"from no namespace, but one is recorded", map[string]string{to: "shop", before: ""}, "other", volume.ErrPrecondition},
		{"to no namespace", map[string]string{}, "", volume.ErrInvalid},
		{"to an invalid namespace", map[string]string{to: "Not A Namespace"}, "", volume.ErrInvalid},
		{"unknown key", map[string]string{to: "shop", "iops": "1"}, "", volume.ErrInvalid},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c, err := volume.ParseNamespaceChange(tc.in)
			v := volume.Volume{Namespace: tc.recorded}
			if err == nil {
				v, err = c.Apply(v)
			}
			if !errors.Is(err, tc.want) || (err == nil) != (tc.want == nil) {
				t.Fatalf("got %v, want %v", err, tc.want)
			}
			if err == nil && v.Namespace != "shop" {
				t.Errorf("got namespace %q, want shop", v.Namespace)
			}
		})
	}
}
