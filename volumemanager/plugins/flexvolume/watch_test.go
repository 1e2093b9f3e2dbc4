package flexvolume_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volumemanager/plugins/flexvolume"
)

// run runs a plugin until the test ends.
func (m *machine) run(changed func()) {
	m.t.Helper()
	p := flexvolume.New(m.Host, mount.NewNFSUnmounter(), m.dir, changed)
	ctx, stop := context.WithCancel(m.t.Context())
	ended := make(chan error)
	go func() { ended <- p.Run(ctx) }()
	m.t.Cleanup(func() {
		stop()
		must(m.t, <-ended)
	})
}

// TestRunProbes: Run makes the call init of an installed driver, also if no pod uses it.
func TestRunProbes(t *testing.T) {
	m := newMachine(t)
	m.install(caseInit)
	m.run(func() {})
	must(t, retry.For(t.Context(), time.Minute, func() (again bool, err error) {
		b, err := os.ReadFile(m.log)
		if err == nil && !bytes.HasSuffix(b, []byte("\n")) {
			err = errors.New("no complete call")
		}
		return err != nil, err
	}))
	m.wantCalls("init")
}

// TestRun: changed is called when a driver is installed and when it is replaced, even if the directory of
// drivers does not exist when Run starts.
func TestRun(t *testing.T) {
	m := newMachine(t)
	m.dir = filepath.Join(m.dir, "not", "yet")
	changed := make(chan struct{}, 100)
	m.run(func() { changed <- struct{}{} })
	spec := persistent(corev1.FlexPersistentVolumeSource{Driver: "acme/disk"})
	for installed := false; !installed; { // until the directory is watched
		must(t, os.MkdirAll(m.dir, 0o755))
		must(t, os.RemoveAll(filepath.Join(m.dir, "acme~disk")))
		m.install(caseInit)
		select {
		case <-changed:
			installed = true
		case <-time.After(10 * time.Millisecond):
		}
	}
	if needs, err := m.of(spec).NeedsAttach(spec); needs || err != nil {
		t.Errorf("NeedsAttach: got %t, %v; want false", needs, err)
	}
	for replaced := false; !replaced; { // until the driver's directory is watched
		m.install(caseInit, caseMount)
		select {
		case <-changed:
			replaced = true
		case <-time.After(10 * time.Millisecond):
		}
	}
}
