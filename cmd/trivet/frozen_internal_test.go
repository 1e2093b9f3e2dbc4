package main

import (
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"github.com/trivet-csi/trivet/backend/disk"
	"github.com/trivet-csi/trivet/backend/lvm"
	"github.com/trivet-csi/trivet/cluster/kubectl"
	"github.com/trivet-csi/trivet/cluster/status"
	"github.com/trivet-csi/trivet/doctor"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/test/frozen"
	"github.com/trivet-csi/trivet/volume"
	"github.com/trivet-csi/trivet/volumemanager"
)

// configKeys returns the keys of the configuration, with those of the sections of pools.
func configKeys() []string {
	all := frozen.Keys(reflect.TypeFor[driver.Config](), "yaml")
	for _, k := range kinds {
		if k.PoolSection == nil {
			continue
		}
		section := k.PoolSection()
		for _, key := range frozen.Keys(reflect.TypeOf(section), "yaml") {
			all = append(all, "pools[]."+string(section.Kind())+"."+key)
		}
	}
	return all
}

// TestFrozenConfig: the configuration files of earlier versions are accepted, with the same meaning. Together they have
// all keys.
func TestFrozenConfig(t *testing.T) {
	frozen.List(t, "configuration", configKeys())
	found := map[string]bool{}
	for name, want := range map[string]driver.Config{
		"node": {
			MaxVolumesPerNode: 200, EphemeralMemory: "1Gi", FlexVolume: driver.FlexVolume{Endpoint: "unix:///run/trivet/csi.sock"}, Pprof: true,
			Forwarding: &driver.Forwarding{Listen: "192.0.2.1:9808", Certificates: "/etc/trivet/certificates"},
			Kubernetes: &driver.Kubernetes{KubeletDir: "/var/lib/kubelet", StartupTaint: true, NFS: true, Authority: "trivet-ca"},
			Pools: []pool.Config{
				{
					Name: "ssd", Directory: pool.Directory{Path: "/var/lib/pools/ssd"}, Size: "500Gi", Reserve: "10%", Overcommit: 1.5, MaxVolumes: 100,
					UUID: "0a1b2c3d-0123-4567-89ab-0123456789ab", RequireMount: true, Quota: "required", FreezeLimit: "20s", Ephemeral: true,
				},
				{Name: "disks", Section: &disk.Disks{Match: []string{"/dev/disk/by-id/nvme-*"}}},
				{Name: "nas", NFS: &pool.NFS{
					Server: "server.example", Export: "/export", MountOptions: []string{"noatime"}, Init: true, Fencing: "none", Outage: "20m",
				}},
			},
		},
		"group": {MaxVolumesPerNode: 4096, Pools: []pool.Config{{Name: "group", Section: &lvm.Group{VolumeGroup: "vg0"}}}},
		"thin":  {MaxVolumesPerNode: 4096, Pools: []pool.Config{{Name: "thin", Section: &lvm.Group{VolumeGroup: "vg0", ThinPool: "pool0"}}}},
		"trim": {MaxVolumesPerNode: 4096, Pools: []pool.Config{{
			Name: "thin", Directory: pool.Directory{Path: "/var/lib/pools/thin"}, Trim: "weekly", TrimWindow: "01:00-05:00", TrimBytesPerSecond: "100Mi",
		}}},
		"check": {MaxVolumesPerNode: 4096, Pools: []pool.Config{{
			Name: "images", Directory: pool.Directory{Path: "/var/lib/pools/images"}, Check: "monthly", CheckWindow: "22:00-06:00",
		}}},
		"background": {MaxVolumesPerNode: 4096, Pools: []pool.Config{{
			Name: "default", Directory: pool.Directory{Path: "/var/lib/pools/default"}, BackgroundBytesPerSecond: "200Mi",
		}}},
		"transfer": {
			MaxVolumesPerNode: 4096, TransferLimit: driver.TransferLimit{BytesPerSecond: "200Mi", Streams: 8},
			Pools: []pool.Config{{Name: "default", Directory: pool.Directory{Path: "/var/lib/pools/default"}}},
		},
		"controller": {
			MaxVolumesPerNode: 4096, Forwarding: &driver.Forwarding{Nodes: []driver.ForwardingNode{{Name: "node-1.example", Address: "192.0.2.1:9808"}}},
		},
		"kubernetes-controller": {
			MaxVolumesPerNode: 4096, Forwarding: &driver.Forwarding{},
			Kubernetes: &driver.Kubernetes{
				KubeletDir: "/var/lib/kubelet", Authority: "trivet-ca", NodeService: "trivet-node", NodeServiceAccount: "trivet-node", PoolOwners: "trivet-pool-owners",
			},
		},
		"events": {
			MaxVolumesPerNode: 4096, Forwarding: &driver.Forwarding{},
			Kubernetes: &driver.Kubernetes{
				KubeletDir: "/var/lib/kubelet", Authority: "trivet-ca", NodeService: "trivet-node", NodeServiceAccount: "trivet-node", PoolOwners: "trivet-pool-owners",
				Events: true,
			},
		},
		"node-loss": {
			MaxVolumesPerNode: 4096, Forwarding: &driver.Forwarding{},
			Kubernetes: &driver.Kubernetes{
				KubeletDir: "/var/lib/kubelet", Authority: "trivet-ca", NodeService: "trivet-node", NodeServiceAccount: "trivet-node", PoolOwners: "trivet-pool-owners",
				NodeLossDelay: "10m",
			},
		},
		"protect-claims": {
			MaxVolumesPerNode: 4096, Forwarding: &driver.Forwarding{},
			Kubernetes: &driver.Kubernetes{
				KubeletDir: "/var/lib/kubelet", Authority: "trivet-ca", NodeService: "trivet-node", NodeServiceAccount: "trivet-node", PoolOwners: "trivet-pool-owners",
				ProtectClaims: true,
			},
		},
	} {
		b, err := os.ReadFile(filepath.Join("testdata/frozen", name+".yaml"))
		if err != nil {
			t.Fatal(err)
		}
		if got, err := driver.ParseConfig(b, kinds); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s is read as\n%+v, %v\nwant\n%+v", name, got, err, want)
		}
		var content any
		if err := yaml.Unmarshal(b, &content); err != nil {
			t.Fatal(err)
		}
		for _, path := range frozen.Paths(content) {
			found[path] = true
		}
	}
	for _, key := range configKeys() {
		if path, _, _ := strings.Cut(key, " "); !found[path] {
			t.Errorf("no file in testdata/frozen has the key %s: add it to a new file", path)
		}
	}
}

// TestFrozenParameters: StorageClasses of earlier versions are accepted, with the same meaning.
func TestFrozenParameters(t *testing.T) {
	var all []string
	for _, k := range kinds {
		for _, p := range k.Takes() {
			one := k.Name + " " + p.Key
			if p.Default != "" {
				one += ", default " + p.Default
			}
			all = append(all, one)
			for _, value := range p.Values {
				all = append(all, k.Name+" "+p.Key+"="+value)
			}
		}
		for _, medium := range k.Media {
			all = append(all, k.Name+" in pools of kind "+string(medium))
		}
	}
	frozen.List(t, "parameters", all)
	for _, tc := range []struct {
		class map[string]string
		want  volume.Parameters
	}{
		{nil, volume.Parameters{Backend: "loop", Values: map[string]string{"allocation": "thin"}}},
		{map[string]string{"server": "s", "share": "/e"}, volume.Parameters{Backend: "nfs", Pool: "=s=/e"}},
		{map[string]string{"backend": "disk", "pool": "p"}, volume.Parameters{Backend: "disk", Pool: "p", Values: map[string]string{"wipe": "discard"}}},
	} {
		got, err := kinds.Parse(tc.class)
		if err != nil || got.Backend != tc.want.Backend || got.Pool != tc.want.Pool {
			t.Errorf("class %v: got %+v, %v; want %+v", tc.class, got, err, tc.want)
		}
		for key, want := range tc.want.Values {
			if got.Get(key) != want {
				t.Errorf("class %v: got %s=%s, want %s", tc.class, key, got.Get(key), want)
			}
		}
	}
}

// TestFrozenOutput: the JSON output of commands keeps its keys.
func TestFrozenOutput(t *testing.T) {
	outputs := map[string]reflect.Type{
		"kubectl trivet status":  reflect.TypeFor[clusterStatus](),
		"kubectl trivet volumes": reflect.TypeFor[[]kubectl.Volume](),
		"kubectl trivet orphans": reflect.TypeFor[[]kubectl.Orphan](),
		"kubectl trivet doctor":  reflect.TypeFor[[]nodeCheck](),
		"kubectl trivet top":     reflect.TypeFor[topOutput](),
		"report of a driver":     reflect.TypeFor[status.Report](), // HTTP, and between the drivers of different versions
		"volumes":                reflect.TypeFor[[]status.Volume](),
		"doctor":                 reflect.TypeFor[[]doctor.Check](),
		"version":                reflect.TypeFor[buildInfo](),
		"pool init":              reflect.TypeFor[newPool](),
		"volume-manager status":  reflect.TypeFor[volumemanager.Status](),
		"volume-manager wait":    reflect.TypeFor[volumemanager.PodStatus](),
	}
	var all []string
	for _, command := range slices.Sorted(maps.Keys(outputs)) {
		for _, key := range frozen.Keys(outputs[command], "json") {
			all = append(all, command+": "+key)
		}
	}
	frozen.List(t, "output", all)
}

// TestFrozenCommands: commands and their flags keep their names, types and defaults.
func TestFrozenCommands(t *testing.T) {
	clearEnvironment(t)
	var all []string
	for _, c := range everyCommand() {
		all = append(all, c.CommandPath())
		c.LocalNonPersistentFlags().VisitAll(func(f *pflag.Flag) { all = append(all, flagEntry(c.CommandPath(), f)) })
		c.PersistentFlags().VisitAll(func(f *pflag.Flag) { all = append(all, flagEntry(c.CommandPath(), f)) })
	}
	frozen.List(t, "commands", all)
}

func flagEntry(command string, f *pflag.Flag) string {
	name := "--" + f.Name
	if f.Shorthand != "" {
		name += ", -" + f.Shorthand
	}
	return strings.TrimSpace(command + " " + name + " " + f.Value.Type() + " " + f.DefValue)
}
