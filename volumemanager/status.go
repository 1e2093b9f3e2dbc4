package volumemanager

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/volumemanager/claim"
	"github.com/trivet-csi/trivet/volumemanager/event"
	"github.com/trivet-csi/trivet/volumemanager/manifest"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
	"github.com/trivet-csi/trivet/volumemanager/plugins/csi"
	"github.com/trivet-csi/trivet/volumemanager/reconciler"
)

// Status is what a manager tells of itself.
type Status struct {
	Node string `json:"node"`
	// Complete says that every manifest was read well at least once.
	Complete          bool                      `json:"complete"`
	Volumes           []reconciler.VolumeStatus `json:"volumes"`
	Claims            []claim.ClaimStatus       `json:"claims"`
	PersistentVolumes []claim.VolumeStatus      `json:"persistentVolumes"`
	Drivers           []csi.DriverStatus        `json:"drivers"`
	Problems          []manifest.Problem        `json:"problems"`
	Events            []event.Event             `json:"events"`
}

// PodStatus is what a manager tells of a pod's volumes.
type PodStatus struct {
	// Known says that the manifests have the pod.
	Known   bool                      `json:"known"`
	Ready   bool                      `json:"ready"`
	Volumes []reconciler.VolumeStatus `json:"volumes"`
}

func (m *Manager) status() Status {
	objects := m.host.now()
	claims, volumes := m.claims.Status()
	return Status{
		Node: m.options.NodeName, Complete: objects.Complete,
		Volumes: list(m.reconciler.Status()), Claims: list(claims), PersistentVolumes: list(volumes), Drivers: list(m.csi.Drivers()),
		Problems: list(m.store.Problems(), objects.Problems), Events: list(m.events.List()),
	}
}

// list has JSON say that there is nothing by an empty list.
func list[T any](parts ...[]T) []T { return append([]T{}, slices.Concat(parts...)...) }

func (m *Manager) pod(key types.NamespacedName) PodStatus {
	ready, volumes, known := m.reconciler.PodReady(key)
	return PodStatus{Known: known, Ready: ready, Volumes: list(volumes)}
}

// awaitPod returns when a pod is ready, or ctx ends.
func (m *Manager) awaitPod(ctx context.Context, key types.NamespacedName) PodStatus {
	changed := m.changes.subscribe()
	defer m.changes.unsubscribe(changed)
	for {
		s := m.pod(key)
		if s.Ready {
			return s
		}
		select {
		case <-ctx.Done():
			return s
		case <-changed:
		case <-time.After(time.Second): // an operation is done a moment before its state is
		}
	}
}

// ErrNotRunning means: no manager has the root directory.
var ErrNotRunning = errors.New("no volume manager runs there")

// ReadStatus asks the manager of a root directory.
func ReadStatus(ctx context.Context, root string) (s Status, err error) {
	return s, ask(ctx, root, "/status", &s)
}

// AwaitPod asks the manager of a root directory, and again while none runs there, until
// all volumes of a pod are mounted, or the time is over: then the pod is not ready.
func AwaitPod(ctx context.Context, root string, pod types.NamespacedName, timeout time.Duration) (s PodStatus, err error) {
	end := time.Now().Add(timeout)
	for {
		left := max(time.Until(end), 0)
		err = ask(ctx, root, "/pods/"+url.PathEscape(pod.Namespace)+"/"+url.PathEscape(pod.Name)+"?wait="+left.String(), &s)
		if !errors.Is(err, ErrNotRunning) || left == 0 {
			return s, err
		}
		select {
		case <-ctx.Done():
			return s, ctx.Err()
		case <-time.After(min(left, 200*time.Millisecond)):
		}
	}
}

func socket(root string) (string, error) {
	path := filepath.Join(stateDir(root), "manager.sock")
	if err := plugins.CheckSocket(path); err != nil {
		return "", fmt.Errorf("--root-dir %s: %w", root, err)
	}
	return path, nil
}

// ask gets an answer of the manager's socket.
func ask(ctx context.Context, root, path string, answer any) error {
	at, err := socket(root)
	if err != nil {
		return err
	}
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", at)
	}
	client := &http.Client{Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://manager"+path, nil)
	if err != nil {
		return err
	}
	response, err := client.Do(request)
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) {
		return fmt.Errorf("--root-dir %s: %w: start trivet volume-manager with it", root, ErrNotRunning)
	}
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		said, _ := io.ReadAll(io.LimitReader(response.Body, 4096))
		return errors.New(strings.TrimSpace(string(said)))
	}
	return json.NewDecoder(response.Body).Decode(answer)
}
