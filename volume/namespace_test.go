package volume_test

import (
	"errors"
	"testing"

	"github.com/trivet-csi/trivet/volume"
)

func TestCheckNamespace(t *testing.T) {
	for _, tc := range []struct {
		recorded string
		want     error
	}{{"shop", nil}, {"other", volume.ErrPrecondition}, {"", volume.ErrPrecondition}} {
		if err := (volume.Volume{Namespace: tc.recorded}).CheckNamespace("shop"); !errors.Is(err, tc.want) || (err == nil) != (tc.want == nil) {
			t.Errorf("recorded %q: %v", tc.recorded, err)
		}
	}
}

func TestNamespaceChange(t *testing.T) {
	const to, before = volume.ParamNamespace, volume.ParamNamespaceBefore
	for _, tc := range []struct {
		name     string
		in       map[string]string
		recorded string
		want     error
	}{
		{"from any", map[string]string{to: "shop"}, "other", nil},
		{"from none", map[string]string{to: "shop", before: ""}, "", nil},
		{"from none, and it has one", map[string]string{to: "shop", before: ""}, "other", volume.ErrPrecondition},
		{"to none", map[string]string{}, "", volume.ErrInvalid},
		{"to what is no namespace", map[string]string{to: "Not A Namespace"}, "", volume.ErrInvalid},
		{"unknown key", map[string]string{to: "shop", "iops": "1"}, "", volume.ErrInvalid},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c, err := volume.ParseNamespaceChange(tc.in)
			v := volume.Volume{Namespace: tc.recorded}
			if err == nil {
				v, err = c.Apply(v)
			}
			if !errors.Is(err, tc.want) || (err == nil) != (tc.want == nil) {
				t.Fatalf("%v; want %v", err, tc.want)
			}
			if err == nil && v.Namespace != "shop" {
				t.Errorf("namespace %q", v.Namespace)
			}
		})
	}
}
