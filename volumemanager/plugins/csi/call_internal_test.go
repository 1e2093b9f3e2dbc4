package csi

import (
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
)

// TestRedacted: redacted replaces the secrets of the request in a driver's message.
func TestRedacted(t *testing.T) {
	const tokens = `{"vault":{"token":"eyJh.bGci","expirationTimestamp":null}}`
	for name, test := range map[string]struct {
		request       any
		message, want string
	}{
		"secret with a newline at the end": {&csi.NodeStageVolumeRequest{Secrets: map[string]string{"key": "hunter2\n"}}, "cannot open with hunter2: no", "cannot open with ***: no"},
		"secret that is part of another":   {&csi.NodeStageVolumeRequest{Secrets: map[string]string{"user": "admin", "key": "admin123"}}, "admin123?", "***?"},
		"token":                            {&csi.NodePublishVolumeRequest{VolumeContext: map[string]string{tokensKey: tokens}}, "eyJh.bGci has expired", "*** has expired"},
		"token among the secrets":          {&csi.NodePublishVolumeRequest{Secrets: map[string]string{tokensKey: tokens}}, "eyJh.bGci has expired", "*** has expired"},
		"empty secret":                     {&csi.NodeStageVolumeRequest{Secrets: map[string]string{"key": ""}}, "no", "no"},
	} {
		if got := redacted(test.message, test.request); got != test.want {
			t.Errorf("%s: got %q, want %q", name, got, test.want)
		}
	}
}
