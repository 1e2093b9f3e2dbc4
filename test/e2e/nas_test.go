//go:build e2e && vm

package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/internal/testenv/nfsd"
)

// podNetwork contains the addresses of the pods (cluster/node-files.sh).
const podNetwork = "10.88.0.0/16"

// TestNAS installs the chart with the values for a NAS. Two pods share a directory of the NAS, and a third pod
// has a disk image on it, which grows while the pod runs. After the claims are deleted, the directory is
// archived and the image is removed. The kernel needs an NFS client and server, so the test runs only in the
// virtual machine.
func TestNAS(t *testing.T) {
	s := nfsd.Start(t, nfsd.Options{})
	s.Link().Route(t, podNetwork)
	shared, images := s.Dir(s.Export(t, "tank/shared")), s.Dir(s.Export(t, "tank/images"))
	installNAS(t, s.Address())
	objects := filepath.Join(t.TempDir(), "objects.yaml")
	must(t, os.WriteFile(objects, []byte(sharedClaim+
		quietPod("a", "shared", "echo a >/data/a && until cp /data/b /data/copy-of-b; do sleep 1; done")+
		quietPod("b", "shared", "echo b >/data/b && until cp /data/a /data/copy-of-a; do sleep 1; done")+
		"---"+claim("image", "nas-images", "320Mi", "")+quietPod("image", "image", "true")), 0o600))
	kubectl(t, "apply", "-f", objects)
	kubectl(t, "wait", "pod", "--all", "--for=condition=Ready", "--timeout=5m")

	for _, pod := range []string{"a", "b"} {
		file := filepath.Join(shared, "default/shared/copy-of-"+pod)
		eventually(t, time.Minute, file+" has the text of pod "+pod, func() (string, bool) {
			text, err := os.ReadFile(file)
			return fmt.Sprintf("%q, %v", text, err), string(text) == pod+"\n"
		})
	}
	kubectl(t, "patch", "pvc", "image", "-p", `{"spec":{"resources":{"requests":{"storage":"640Mi"}}}}`)
	kubectl(t, "wait", "pvc/image", "--for=jsonpath={.status.capacity.storage}=640Mi", "--timeout=5m")
	df := strings.Fields(kubectl(t, "exec", "image", "--", "df", "-Pm", "/data"))
	if size, err := strconv.Atoi(df[len(df)-5]); err != nil || size < 640*9/10 || size > 640 {
		t.Errorf("df after the growth: got %q, want 90 to 100 %% of 640 MiB", df)
	}

	kubectl(t, "delete", "pod,pvc", "--all", "--timeout=5m")
	eventually(t, time.Minute, "no volumes are left", func() (string, bool) {
		left := leftObjects()
		for _, dir := range []string{shared, images} {
			entries, err := testenv.PoolEntries(dir)
			if err != nil {
				left = append(left, err.Error())
			}
			left = append(left, entries...)
		}
		return strings.Join(left, "; "), len(left) == 0
	})
	kept, err := filepath.Glob(filepath.Join(shared, "archived/*/data/copy-of-*"))
	if err != nil || len(kept) != 2 {
		t.Errorf("archived files: got %q, %v, want two", kept, err)
	}
}

// sharedClaim is a claim for a directory, with the default class.
const sharedClaim = `
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: shared}
spec:
  accessModes: [ReadWriteMany]
  resources: {requests: {storage: 64Mi}}
`

// installNAS installs the chart with the values for a NAS until the end of the test.
func installNAS(t *testing.T, server string) {
	t.Helper()
	values := filepath.Join(t.TempDir(), "nas.yaml")
	must(t, os.WriteFile(values, []byte(strings.NewReplacer("nas.lan", server, "6Ti", "1Gi", "2Ti", "1Gi").Replace(read(t, examples+"/values/nas.yaml"))), 0o600))
	t.Cleanup(func() {
		if t.Failed() {
			describe(t, "default")
		}
		if out, err := try(context.Background(), "helm", "uninstall", "trivet", "-n", namespace, "--wait", "--timeout="+extraTime.String()); err != nil {
			t.Error(out)
		}
	})
	installOneNode(t, "-f", values)
}
