package flexvolume_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/trivet-csi/trivet/internal/testenv"
)

// testNamespace: a volume belongs to the namespace that mounted it first, whoever names
// it, also after it was unmounted. An administrator gives it to another.
func testNamespace(t *testing.T, binary string) {
	k := newKubelet(t, binary, testenv.SimpleQuotas(t, "2G"))
	for _, driver := range []string{"loop", "local"} {
		t.Run(driver, func(t *testing.T) { k.on(t).namespaces(driver) })
	}
}

func (k *kubelet) namespaces(driver string) {
	of := func(namespace string, extra ...string) string {
		return options(append(extra, "kubernetes.io/pod.namespace", namespace, "volume", driver)...)
	}
	shop, thief := k.target("shop"), k.target("thief")
	k.succeed(driver, "mount", shop, of("shop", "size", "160Mi"))
	k.write(filepath.Join(shop, "file"), "secret")
	refused := func() {
		k.refuse(`belongs to namespace "shop"`, driver, "mount", thief, of("thief"))
		k.refuse(`belongs to namespace "shop"`, driver, "mount", thief, of("thief", "size", "160Mi"))
		k.refuse(`belongs to namespace "shop"`, driver, "mount", thief, of("thief", "kubernetes.io/readwrite", "ro"))
		k.refuse("option kubernetes.io/pod.namespace is missing", driver, "mount", thief, of(""))
	}
	refused()
	k.refuse("is mounted", driver, "assign", "thief", of("shop"))
	second := k.target("second")
	k.succeed(driver, "mount", second, of("shop"))
	k.succeed(driver, "unmount", second)
	k.succeed(driver, "unmount", shop)
	refused()

	k.refuse(`namespace "Not A Namespace"`, driver, "assign", "Not A Namespace", of("shop"))
	k.succeed(driver, "assign", "heir", of("shop"))
	k.refuse(`belongs to namespace "heir"`, driver, "mount", k.target("shop"), of("shop"))
	heir := k.target("heir")
	k.succeed(driver, "mount", heir, of("heir"))
	k.read(filepath.Join(heir, "file"), "secret")
	k.succeed(driver, "unmount", heir)
}

// testMountedBefore: a volume that is mounted and has no namespace on record, as after an
// upgrade from a version that recorded none, belongs to nobody before an administrator
// assigns it.
func testMountedBefore(t *testing.T, binary string) {
	k := newKubelet(t, binary, testenv.SimpleQuotas(t, "2G"))
	of := func(namespace string) string {
		return options("kubernetes.io/pod.namespace", namespace, "volume", "old", "size", "160Mi")
	}
	shop, second, thief := k.target("shop"), k.target("second"), k.target("thief")
	k.succeed("loop", "mount", shop, of("shop"))
	k.forgetNamespace()
	k.refuse("with the call assign", "loop", "mount", thief, of("thief"))
	k.refuse("with the call assign", "loop", "mount", second, of("shop"))

	k.succeed("loop", "assign", "shop", of("shop"))
	k.refuse(`belongs to namespace "shop"`, "loop", "mount", thief, of("thief"))
	k.refuse("is mounted", "loop", "assign", "thief", of("shop"))
	k.succeed("loop", "mount", second, of("shop"))
	k.succeed("loop", "unmount", second)

	k.forgetNamespace()
	k.succeed("loop", "unmount", shop)
	k.refuse("with the call assign", "loop", "mount", second, of("shop"))
	k.succeed("loop", "assign", "shop", of(""))
	k.succeed("loop", "mount", second, of("shop"))
	k.refuse(`belongs to namespace "shop"`, "loop", "mount", thief, of("thief"))
	k.succeed("loop", "unmount", second)
}

// forgetNamespace removes the namespace from the record of the pool's only volume.
func (k *kubelet) forgetNamespace() {
	k.t.Helper()
	records, err := filepath.Glob(filepath.Join(k.pool, "volumes", "*", "volume.json"))
	must(k.t, err)
	if len(records) != 1 {
		k.t.Fatalf("records: %q", records)
	}
	b, err := os.ReadFile(records[0])
	must(k.t, err)
	var record map[string]any
	must(k.t, json.Unmarshal(b, &record))
	delete(record, "namespace")
	b, err = json.Marshal(record)
	must(k.t, err)
	must(k.t, os.WriteFile(records[0], b, 0o600))
}

// testSubDir: no pod has a directory made a volume that it does not own: what is in the
// pool's directory beside the volumes, or another volume that is kept in place.
func testSubDir(t *testing.T, binary string) {
	k := newKubelet(t, binary, testenv.SimpleQuotas(t, "2G"))
	k.refuse("give option size", "local", "mount", k.target("web"), options()) // it makes the pool
	must(t, os.MkdirAll(filepath.Join(k.pool, "others"), 0o700))
	for _, dir := range []string{"others", "new"} {
		k.refuse(`option subDir="`+dir+`"`, "local", "mount", k.target("web"), options("size", "32Mi", "subDir", dir, "onDelete", "retain"))
	}
}
