package identity_test

import (
	"errors"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/identity"
)

// TestProbe: Probe reports whether the driver is ready, and returns the error if no call can succeed.
func TestProbe(t *testing.T) {
	ready, broken := false, error(nil)
	s := &identity.Server{Ready: func() bool { return ready }, Usable: func() error { return broken }}
	probe := func() (bool, error) {
		resp, err := s.Probe(t.Context(), &csi.ProbeRequest{})
		return resp.GetReady().GetValue(), err
	}
	if got, err := probe(); got || err != nil {
		t.Errorf("while pools are being opened: got ready %t, %v; want false", got, err)
	}
	ready = true
	if got, err := probe(); !got || err != nil {
		t.Errorf("when the pools are open: got ready %t, %v; want true", got, err)
	}
	broken = errors.New("disk on fire")
	if _, err := probe(); !errors.Is(err, broken) {
		t.Errorf("when the state directory is unusable: got %v, want %v", err, broken)
	}
}
