package volumemanager

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sync/errgroup"
)

// TestPartThatEnds: when one part of the manager cannot go on, the manager ends, so that
// who watches over it can start it again.
func TestPartThatEnds(t *testing.T) {
	dir, err := os.MkdirTemp("", "vm") // names of sockets have 107 bytes at most
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	o := Options{Manifests: filepath.Join(dir, "manifests"), RootDir: dir, Registry: filepath.Join(dir, "registry"), FlexVolumes: filepath.Join(dir, "flex")}
	if err := os.MkdirAll(stateDir(dir), 0o700); err != nil {
		t.Fatal(err)
	}
	parts, ctx := errgroup.WithContext(t.Context())
	m, err := newManager(ctx, o)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = m.store.Close() }()
	broken := errors.New("it cannot go on")
	parts.Go(func() error { return broken })
	if err := m.run(ctx, parts); !errors.Is(err, broken) {
		t.Errorf("it ended with %v", err)
	}
}

// TestForeignRoot: what another program has for its pods is not taken down.
func TestForeignRoot(t *testing.T) {
	dir := t.TempDir()
	content := filepath.Join(dir, "pods/uid/volumes/kubernetes.io~empty-dir/data/file")
	if err := errors.Join(os.MkdirAll(filepath.Dir(content), 0o755), os.WriteFile(content, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // one that is not refused ends at once
	if err := Run(ctx, Options{RootDir: dir, Registry: filepath.Join(dir, "registry")}); !errors.Is(err, ErrForeign) {
		t.Errorf("the root directory of another: %v", err)
	}
	if _, err := os.Lstat(content); err != nil {
		t.Error(err)
	}
	if err := os.Mkdir(stateDir(dir), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := Run(ctx, Options{RootDir: dir, Registry: filepath.Join(dir, "registry")}); errors.Is(err, ErrForeign) {
		t.Errorf("its own root directory: %v", err)
	}
}
