package doctor

import (
	"crypto/x509"
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/cluster/pki"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/pool"
)

func TestJudgeDriver(t *testing.T) {
	o := Options{Endpoint: "unix:///csi/csi.sock", DriverName: "d", Version: "v1"}
	inCluster := o
	inCluster.Pod.InCluster = true
	for name, tc := range map[string]struct {
		facts  driverFacts
		o      Options
		result Result
		says   string
	}{
		"ready":               {driverFacts{name: "d", version: "v1", ready: true}, o, OK, "d v1"},
		"opening its pools":   {driverFacts{name: "d", version: "v1"}, o, Failure, "opening"},
		"broken":              {driverFacts{name: "d", version: "v1", err: errors.New("disk on fire")}, o, Failure, "disk on fire"},
		"not there":           {driverFacts{err: fs.ErrNotExist}, o, Warning, "/csi/csi.sock"},
		"not there, in a pod": {driverFacts{err: fs.ErrNotExist}, inCluster, Failure, "/csi/csi.sock"},
		"silent":              {driverFacts{err: errors.New("refused")}, o, Failure, "refused"},
		"another name":        {driverFacts{name: "x", version: "v1", ready: true}, o, Failure, "expected is d"},
		"another version":     {driverFacts{name: "d", version: "v2", ready: true}, o, Warning, "this is v1"},
	} {
		expect(t, name, judgeDriver(tc.facts, tc.o), tc.result, tc.says)
	}
}

// TestRunningDriver checks a running driver and its pools.
func TestRunningDriver(t *testing.T) {
	// The driver has the pools default and lost, whose directory was replaced after the driver opened
	// it. The configuration has another pool that was added after the start of the driver.
	dir := t.TempDir()
	state := t.TempDir()
	d := backendtest.StartWith(t, driver.Options{
		Endpoint: "unix://" + state + "/csi.sock", NodeID: "n", StateDir: state, Name: "csi.trivet.dev", Version: "test",
		Services: []string{"controller", "node"}, Kinds: backend.Kinds{loop.Kind},
		Config: driver.Config{MaxVolumesPerNode: 1, Pools: []pool.Config{
			{Name: "default", Directory: pool.Directory{Path: dir + "/default"}}, {Name: "lost", Directory: pool.Directory{Path: dir + "/lost"}},
		}},
	})
	config := filepath.Join(dir, "config.yaml")
	must(t, os.WriteFile(config, []byte("pools:\n- {name: default, directory: {path: "+dir+"/default}}\n- {name: lost, directory: {path: "+dir+"/lost}}\n- {name: added, directory: {path: "+dir+"/added}}\n"), 0o600))
	must(t, os.Rename(dir+"/lost", dir+"/moved"))
	must(t, os.Mkdir(dir+"/lost", 0o700))
	checks := Run(t.Context(), Options{ConfigPath: config, StateDir: d.Options.StateDir, Endpoint: d.Options.Endpoint, Version: "test", Patience: time.Minute})
	expect(t, "driver", find(t, checks, "driver"), OK, "csi.trivet.dev test")
	expect(t, "a pool", find(t, checks, "pool default, served"), OK, "open")
	expect(t, "a lost pool", find(t, checks, "pool lost"), Failure, "is its disk mounted?")
	expect(t, "a lost pool, served", find(t, checks, "pool lost, served"), Failure, "is not the directory it was")
	expect(t, "an unknown pool", find(t, checks, "pool added"), Warning, "does not exist")
	expect(t, "an unknown pool, served", find(t, checks, "pool added, served"), Failure, "does not have it")
	expect(t, "state directory", find(t, checks, "state directory"), OK, d.Options.StateDir)
	expect(t, "kubernetes", find(t, checks, "kubernetes"), Skipped, "not in a pod")
}

// TestForwarding checks the drivers of a node and of the controller, then without the node, and with a
// wrong certificate.
func TestForwarding(t *testing.T) {
	dir := t.TempDir()
	c := backendtest.StartCluster(t, []string{dir + "/pool"}, loop.Kind)
	node, router := c.Nodes[0].Options, c.Router.Options
	examined := func(o driver.Options, config string) []Check {
		path := filepath.Join(o.StateDir, "config.yaml")
		must(t, os.WriteFile(path, []byte(config), 0o600))
		return Run(t.Context(), Options{ConfigPath: path, StateDir: o.StateDir, Endpoint: o.Endpoint, Version: "test", Patience: time.Minute})
	}
	nodeConfig := "pools:\n- {name: default, directory: {path: " + dir + "/pool}}\n- {name: other, directory: {path: " + dir + "/other}}\nforwarding: {listen: 127.0.0.1:1}\n"
	routerConfig := "forwarding: {nodes: [{name: " + node.NodeID + ", address: " + node.Config.Forwarding.Listen + "}]}\n"

	checks := examined(node, nodeConfig)
	expect(t, "a pool of the node", find(t, checks, "pool default, served"), OK, "open")
	expect(t, "an unknown pool", find(t, checks, "pool other, served"), Failure, "does not have it")
	expect(t, "the node's certificates", find(t, checks, "certificates"), OK, "valid")
	find(t, checks, "kernel")
	checks = examined(router, routerConfig)
	expect(t, "the controller's nodes", find(t, checks, "nodes"), OK, "all")
	expect(t, "the controller's certificates", find(t, checks, "certificates"), OK, "valid")
	for _, check := range checks {
		if check.Name == "kernel" {
			t.Error("the doctor of the controller checks the node")
		}
	}

	must(t, os.Rename(dir+"/pool", dir+"/away"))
	expect(t, "a lost pool", find(t, examined(node, nodeConfig), "pool default, served"), Failure, dir+"/pool: no such file")
	c.Nodes[0].Stop(t)
	var nodes Check
	for nodes.Result != Failure { // until the controller has detected it
		nodes = find(t, examined(router, routerConfig), "nodes")
	}
	expect(t, "the node away", nodes, Failure, node.NodeID)
	c.Certify(t, router.StateDir+"/certificates", pki.NodeURI(backendtest.DriverName, "x"), x509.ExtKeyUsageServerAuth)
	expect(t, "a node's certificate", find(t, examined(router, routerConfig), "certificates"), Failure, "/node/x, expected is")
	must(t, os.Remove(router.StateDir+"/certificates/ca.crt"))
	expect(t, "no roots", find(t, examined(router, routerConfig), "certificates"), Failure, "ca.crt")
}

// TestForwardedNFSPool: the doctor does not query the driver of a node for nfs pools, which the driver of
// the controller serves.
func TestForwardedNFSPool(t *testing.T) {
	dir := t.TempDir()
	node := backendtest.StartCluster(t, []string{dir + "/pool"}, loop.Kind).Nodes[0].Options
	config, err := driver.ParseConfig([]byte("pools:\n- {name: default, directory: {path: "+dir+"/pool}}\n- {name: shared, nfs: {server: 127.0.0.1, export: /x}}\nforwarding: {listen: 127.0.0.1:1}\n"), backend.Kinds{loop.Kind})
	must(t, err)
	f := readDriver(t.Context(), Options{Endpoint: node.Endpoint}, config)
	if err, queried := f.pools["default"]; err != nil || !queried {
		t.Errorf("the node's pool: %v, queried: %v", err, queried)
	}
	if err, queried := f.pools["shared"]; queried {
		t.Errorf("the nfs pool was queried: %v", err)
	}
}

// TestNoListener: without a socket or a listener the driver has no name.
func TestNoListener(t *testing.T) {
	path := filepath.Join(t.TempDir(), "csi.sock")
	if f := readDriver(t.Context(), Options{Endpoint: "unix://" + path}, driver.Config{}); !errors.Is(f.err, fs.ErrNotExist) {
		t.Errorf("no socket: %+v", f)
	}
	l, err := net.Listen("unix", path)
	must(t, err)
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	must(t, l.Close())
	if f := readDriver(t.Context(), Options{Endpoint: "unix://" + path}, driver.Config{}); f.err == nil || f.name != "" {
		t.Errorf("a socket without a listener: %+v", f)
	}
}

// TestBadConfiguration: an invalid configuration is a failure, and the other checks run.
func TestBadConfiguration(t *testing.T) {
	checks := Run(t.Context(), Options{ConfigPath: "/nowhere.yaml", StateDir: t.TempDir(), Endpoint: "unix:///nowhere", Patience: time.Minute})
	expect(t, "configuration", find(t, checks, "configuration"), Failure, "/nowhere.yaml")
}

// TestHungState: the checks name a state directory that does not answer, and each pool that needs it. The
// other checks run.
func TestHungState(t *testing.T) {
	dir := t.TempDir()
	must(t, os.Mkdir(dir+"/known-pools", 0o700))
	fifo := dir + "/known-pools/default"
	must(t, syscall.Mkfifo(fifo, 0o600))
	t.Cleanup(func() { // ends the reads
		f, err := os.OpenFile(fifo, os.O_RDWR, 0)
		must(t, err)
		must(t, f.Close())
	})
	must(t, os.MkdirAll(dir+"/pools/default", 0o700))
	checks := Run(t.Context(), Options{StateDir: dir, Endpoint: "unix:///nowhere", Patience: time.Second})
	expect(t, "state directory", find(t, checks, "state directory"), Failure, "no answer within 1s")
	expect(t, "pool", find(t, checks, "pool default"), Failure, "no answer within 1s")
	expect(t, "driver", find(t, checks, "driver"), Warning, "no driver")
}

// TestWithin: a check that hangs is a failure.
func TestWithin(t *testing.T) {
	release := make(chan struct{})
	defer close(release)
	checks := within(10*time.Millisecond, "pool p", func() []Check { <-release; return nil })
	expect(t, "hanging", checks[0], Failure, "no answer")
	checks = within(time.Minute, "pool p", func() []Check { return []Check{ok("pool p", "fine")} })
	expect(t, "answering", checks[0], OK, "fine")
}
