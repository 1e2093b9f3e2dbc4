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

// TestNamespaceChange: a namespace is changed only if the request is valid.
func TestNamespaceChange(t *testing.T) {
	const to = volume.ParamNamespace
	for name, in := range map[string]map[string]string{
		"to no namespace":         {},
		"to an invalid namespace": {to: "Not A Namespace"},
		"unknown key":             {to: "shop", "iops": "1"},
	} {
		if got, err := volume.ParseNamespaceChange(in); !errors.Is(err, volume.ErrInvalid) {
			t.Errorf("%s: got %q, %v; want ErrInvalid", name, got, err)
		}
	}
	if got, err := volume.ParseNamespaceChange(map[string]string{to: "shop"}); err != nil || got != "shop" {
		t.Errorf("got %q, %v; want shop", got, err)
	}
}
