{{/* The containers of the pods, one template each. A template takes the chart's root context, unless
its comment says otherwise. */}}

{{/* Fields that the pods of the nodes and of the controller have in common: dict "root" $ "of"
.Values.node or .Values.controller "name" "node" or "controller". With NFS volumes the pods of the nodes
use the network of their nodes, because a mount uses the network of the pod that made it, and the
mounts stay when the pod is replaced. The controller's mounts end with its pod. With Kerberos, they also
need the network of the node, in which rpc.gssd runs. */}}
{{- define "trivet.podBasics" -}}
# The token is mounted explicitly, only into the containers that need it.
automountServiceAccountToken: false
enableServiceLinks: false
{{- if not (include "trivet.nfs" .root) }}
# The containers connect to the API server by its address, and look up no names.
dnsPolicy: Default
{{- else if or (eq .name "node") (include "trivet.controllerOnHost" .root) }}
hostNetwork: true
dnsPolicy: ClusterFirstWithHostNet
{{- else }}
dnsPolicy: ClusterFirst
{{- end }}
priorityClassName: {{ toYaml .of.priorityClassName }}
terminationGracePeriodSeconds: {{ int64 .of.terminationGracePeriodSeconds }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ toYaml . }}
  {{- end }}
{{- end }}
nodeSelector: {{- include "trivet.linux" .of.nodeSelector | nindent 2 }}
{{- end -}}

{{/* Security of a sidecar: dict "root" $ "pod" "node" or "controller". Sidecars have no capabilities. In
the nodes' pods they run as root, because only root can access the driver's socket. In the controller's
pod they run as the user of the pod, which is root with NFS volumes. */}}
{{- define "trivet.sidecarSecurity" -}}
{{- $root := or (eq .pod "node") (include "trivet.nfs" .root) -}}
terminationMessagePolicy: FallbackToLogsOnError
securityContext:
  {{- if eq .pod "node" }}
  runAsUser: 0
  {{- end }}
  privileged: false
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
  seccompProfile: {type: RuntimeDefault}
  {{- if $root }}
  {{- with include "trivet.seLinuxOptions" .root }}
  seLinuxOptions: {{- . | nindent 4 }}
  {{- end }}
  {{- end }}
{{- end -}}

{{/* The SELinux options of the containers that are not privileged and access directories of the node or mount, as YAML.
OpenShift enforces SELinux: there the type is that of a privileged container, whose socket they access. */}}
{{- define "trivet.seLinuxOptions" -}}
{{- with .Values.sidecars.seLinuxOptions | default (ternary (dict "type" "spc_t") dict .Values.openshift.enabled) }}{{ toYaml . }}{{ end -}}
{{- end -}}

{{/* The mount of the pod's ServiceAccount token, for the containers that connect to the API server. */}}
{{- define "trivet.tokenMount" -}}
- name: api-token
  mountPath: /var/run/secrets/kubernetes.io/serviceaccount
  readOnly: true
{{- end -}}

{{- define "trivet.tokenVolume" -}}
- name: api-token
  projected:
    defaultMode: 0400
    sources:
      - serviceAccountToken: {path: token, expirationSeconds: 3607}
      - configMap:
          name: kube-root-ca.crt
          items: [{key: ca.crt, path: ca.crt}]
      - downwardAPI:
          items:
            - path: namespace
              fieldRef: {fieldPath: metadata.namespace}
{{- end -}}

{{/* A sidecar that works for the whole cluster: dict "root" $ "name" its key in .Values.sidecars "title"
the name of the container "args" its own flags "env" its environment "gates" its feature gates.
Only the replica that has the lease is active. The lease has the default times of Kubernetes (15 s,
renewed within 10 s), and is released when the container ends, because every upgrade would otherwise
wait until the lease expires. A container that restarts in its pod still has the lease. With shape
oneNode there is no lease: a DaemonSet starts the next pod only after the previous one has ended, and
the lock of the driver on its pools prevents damage by a second pod. */}}
{{- define "trivet.clusterSidecar" -}}
{{- $s := index .root.Values.sidecars .name -}}
{{- $gates := .gates | default list -}}
- name: {{ .title }}
  image: {{ include "trivet.sidecarImage" . }}
  imagePullPolicy: {{ .root.Values.sidecars.pullPolicy }}
  args:
    - --csi-address=/csi/csi.sock
    - --v={{ .root.Values.logLevel }}
    - --timeout={{ $s.timeout }}
    - --kube-api-qps={{ $s.kubeAPIQPS }}
    - --kube-api-burst={{ $s.kubeAPIBurst }}
    - --retry-interval-start={{ $s.retryIntervalStart }}
    - --retry-interval-max={{ $s.retryIntervalMax }}
    {{- if ne .root.Values.shape "oneNode" }}
    - --leader-election
    - --leader-election-namespace={{ .root.Release.Namespace }}
    - --leader-election-retry-period=2s
    {{- $gates = append $gates "ReleaseLeaderElectionOnExit=true" }}
    {{- end }}
    {{- with $gates }}
    - --feature-gates={{ join "," . }}
    {{- end }}
    {{- range .args }}
    - {{ . }}
    {{- end }}
  {{- with .env }}
  env: {{- . | nindent 4 }}
  {{- end }}
  {{- include "trivet.sidecarSecurity" (dict "root" .root "pod" (ternary "node" "controller" (eq .root.Values.shape "oneNode"))) | nindent 2 }}
  resources: {{- toYaml $s.resources | nindent 4 }}
  volumeMounts:
    - {name: plugin-dir, mountPath: /csi}
    {{- include "trivet.tokenMount" .root | nindent 4 }}
{{- end -}}

{{- define "trivet.driverProbes" -}}
# The driver answers when it can write its state directory. This probe waits neither for pools
# nor for a sidecar whose image is still being pulled.
startupProbe:
  httpGet: {path: /healthz, port: metrics}
  periodSeconds: 1
  timeoutSeconds: 5
  failureThreshold: 120
# The container liveness-probe calls Probe over the driver's socket. Probe reports
# that the driver is not ready while pools are being opened, for at most 30 seconds after the start, and
# there is no answer until the image of livenessprobe is pulled. So the probe may fail for two minutes.
# If the image cannot be pulled, the driver is restarted repeatedly.
livenessProbe:
  httpGet: {path: /healthz, port: health}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 12
# The driver is ready when its pools are open. A restart would not open a pool, so this is not
# part of the livenessProbe.
readinessProbe:
  httpGet: {path: /readyz, port: metrics}
  periodSeconds: 5
  timeoutSeconds: 5
{{- end -}}

{{- define "trivet.nodeDriverContainer" -}}
- name: trivet
  image: {{ include "trivet.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  args:
    - driver
    {{- if ne .Values.shape "oneNode" }}
    - --services=node
    {{- end }}
    - --node-id=$(NODE_NAME)
    - --driver-name={{ .Values.driverName }}
    - --config=/etc/trivet/config.yaml
    - --state-dir={{ clean .Values.stateDir }}
    - --http-address=:{{ .Values.ports.metrics }}
    - --v={{ .Values.logLevel }}
    - --log-format={{ .Values.logFormat }}
  env:
    - name: NODE_NAME
      valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
    - name: POD_NAME
      valueFrom: {fieldRef: {fieldPath: metadata.name}}
    - name: POD_NAMESPACE
      valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
    - name: POD_UID
      valueFrom: {fieldRef: {fieldPath: metadata.uid}}
    # The driver's socket. `trivet doctor` also uses this variable.
    - {name: CSI_ENDPOINT, value: "unix:///csi/csi.sock"}
    # The driver's name that `trivet doctor` expects.
    - name: CSI_DRIVER_NAME
      value: {{ toYaml .Values.driverName }}
    {{- with .Values.env }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  terminationMessagePolicy: FallbackToLogsOnError
  # The default path is in /dev, which is that of the node in this container: the file would remain
  # on the node.
  terminationMessagePath: /run/termination-log
  # Mounts propagate to the node by Bidirectional propagation, which Kubernetes allows only for
  # privileged containers. Loop devices and mounts also need a privileged container.
  securityContext:
    runAsUser: 0
    privileged: true
    readOnlyRootFilesystem: true
  ports:
    - {name: metrics, containerPort: {{ .Values.ports.metrics }}, protocol: TCP}
    # The port of the container liveness-probe, declared here so that the livenessProbe below can use
    # its name.
    - {name: health, containerPort: {{ .Values.ports.health }}, protocol: TCP}
    {{- if ne .Values.shape "oneNode" }}
    - {name: forwarding, containerPort: {{ .Values.ports.forwarding }}, protocol: TCP}
    {{- end }}
  {{- include "trivet.driverProbes" . | nindent 2 }}
  resources: {{- toYaml .Values.node.resources | nindent 4 }}
  volumeMounts:
    - {name: plugin-dir, mountPath: /csi}
    - {name: config, mountPath: /etc/trivet, readOnly: true}
    # The path is that on the node, because the kubelet's requests contain it.
    - {name: kubelet-dir, mountPath: {{ clean .Values.kubeletDir }}, mountPropagation: Bidirectional}
    # Loop devices are created at runtime, and would not appear in the container's own /dev.
    - {name: dev, mountPath: /dev}
    # The cgroups of the pods, in which the driver limits I/O.
    - {name: cgroup, mountPath: /sys/fs/cgroup}
    # With HostToContainer the driver sees disks that are mounted on the node later, below these
    # directories.
    - {name: state-dir, mountPath: {{ clean .Values.stateDir }}, mountPropagation: HostToContainer}
    {{- range $i, $dir := include "trivet.poolMounts" . | fromJsonArray }}
    - {name: pool-{{ $i }}, mountPath: {{ $dir }}, mountPropagation: HostToContainer}
    {{- end }}
    {{- if include "trivet.volumeGroups" . }}
    # The locks of LVM: no command of the node changes a volume group at the same time as the driver.
    - {name: lvm-locks, mountPath: /run/lock/lvm}
    {{- end }}
    {{- include "trivet.tokenMount" . | nindent 4 }}
{{- end -}}

{{- define "trivet.controllerDriverContainer" -}}
- name: trivet
  image: {{ include "trivet.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  args:
    - driver
    - --services=controller
    - --driver-name={{ .Values.driverName }}
    - --config=/etc/trivet/config.yaml
    - --state-dir=/var/lib/trivet
    - --http-address=:{{ include "trivet.port" (dict "root" . "pod" "controller" "name" "metrics") }}
    - --v={{ .Values.logLevel }}
    - --log-format={{ .Values.logFormat }}
  env:
    - name: POD_NAME
      valueFrom: {fieldRef: {fieldPath: metadata.name}}
    - name: POD_NAMESPACE
      valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
    - name: POD_UID
      valueFrom: {fieldRef: {fieldPath: metadata.uid}}
    # The driver's socket. `trivet doctor` also uses this variable.
    - {name: CSI_ENDPOINT, value: "unix:///csi/csi.sock"}
    # The driver's name that `trivet doctor` expects.
    - name: CSI_DRIVER_NAME
      value: {{ toYaml .Values.driverName }}
    {{- with .Values.env }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  terminationMessagePolicy: FallbackToLogsOnError
  securityContext:
    privileged: false
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    {{- if include "trivet.nfs" . }}
    # SYS_ADMIN: the driver mounts exports, visible only to itself, while it runs. The
    # seccomp profile of the runtime allows mounts with this capability, its AppArmor profile
    # does not. FOWNER: it removes deleted volumes, with files of other users in sticky
    # directories; the server grants all other permissions to root. SETUID, SETGID: if root is
    # squashed, it tests whether other users are squashed too. MKNOD: a copy of a directory
    # contains its device nodes.
    capabilities: {drop: [ALL], add: [SYS_ADMIN, FOWNER, SETUID, SETGID, MKNOD]}
    appArmorProfile: {type: Unconfined}
    {{- with include "trivet.seLinuxOptions" . }}
    seLinuxOptions: {{- . | nindent 6 }}
    {{- end }}
    {{- else }}
    capabilities: {drop: [ALL]}
    {{- end }}
    seccompProfile: {type: RuntimeDefault}
  ports:
    - {name: metrics, containerPort: {{ include "trivet.port" (dict "root" . "pod" "controller" "name" "metrics") }}, protocol: TCP}
    # The port of the container liveness-probe, declared here so that the livenessProbe below can use
    # its name.
    - {name: health, containerPort: {{ include "trivet.port" (dict "root" . "pod" "controller" "name" "health") }}, protocol: TCP}
  # The driver is stopped five seconds after the sidecars, because a sidecar that loses its connection
  # to the driver ends without releasing its lease.
  lifecycle:
    preStop:
      sleep: {seconds: 5}
  {{- include "trivet.driverProbes" . | nindent 2 }}
  resources: {{- toYaml .Values.controller.resources | nindent 4 }}
  volumeMounts:
    - {name: plugin-dir, mountPath: /csi}
    - {name: config, mountPath: /etc/trivet, readOnly: true}
    - {name: state-dir, mountPath: /var/lib/trivet}
    {{- include "trivet.tokenMount" . | nindent 4 }}
{{- end -}}

{{- define "trivet.registrarContainer" -}}
- name: node-driver-registrar
  image: {{ include "trivet.sidecarImage" (dict "root" . "name" "registrar") }}
  imagePullPolicy: {{ .Values.sidecars.pullPolicy }}
  args:
    - --csi-address=/csi/csi.sock
    - --kubelet-registration-path={{ clean .Values.kubeletDir }}/plugins/{{ .Values.driverName }}/csi.sock
    # The default of one second is too short on a node that is starting.
    - --timeout=10s
    - --http-endpoint=:{{ .Values.ports.registrar }}
    - --v={{ .Values.logLevel }}
  {{- include "trivet.sidecarSecurity" (dict "root" . "pod" "node") | nindent 2 }}
  ports:
    - {name: registrar, containerPort: {{ .Values.ports.registrar }}, protocol: TCP}
  # The registrar answers after the driver has returned its name. A restart would not accelerate
  # that, so this probe may fail for ten minutes.
  startupProbe:
    httpGet: {path: /healthz, port: registrar}
    periodSeconds: 1
    timeoutSeconds: 5
    failureThreshold: 600
  # The probe fails if the registration socket does not answer. If a second installation on the
  # node is uninstalled, that installation removes the socket, and the kubelet unregisters the
  # driver. The restarted registrar creates the socket again.
  livenessProbe:
    httpGet: {path: /healthz, port: registrar}
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 3
  resources: {{- toYaml .Values.sidecars.registrar.resources | nindent 4 }}
  volumeMounts:
    - {name: plugin-dir, mountPath: /csi}
    - {name: registration-dir, mountPath: /registration}
{{- end -}}

{{/* The container that answers the livenessProbe of the driver: dict "root" $ "pod" "node" or
"controller". */}}
{{- define "trivet.livenessContainer" -}}
- name: liveness-probe
  image: {{ include "trivet.sidecarImage" (dict "root" .root "name" "livenessProbe") }}
  imagePullPolicy: {{ .root.Values.sidecars.pullPolicy }}
  args:
    - --csi-address=/csi/csi.sock
    - --http-endpoint=:{{ include "trivet.port" (dict "root" .root "pod" .pod "name" "health") }}
    # Below the timeoutSeconds of the livenessProbe, so that the response contains the reason.
    - --probe-timeout=4s
    - --v={{ .root.Values.logLevel }}
  {{- include "trivet.sidecarSecurity" . | nindent 2 }}
  resources: {{- toYaml .root.Values.sidecars.livenessProbe.resources | nindent 4 }}
  volumeMounts:
    - {name: plugin-dir, mountPath: /csi}
{{- end -}}

{{/* --extra-create-metadata: subDir may contain the names of the claim and the volume. There is no
--default-fstype, because the driver has a default for disk images, and a directory has no filesystem
type. */}}
{{- define "trivet.provisionerContainer" -}}
{{- $s := .Values.sidecars.provisioner -}}
{{- $args := list
  (printf "--worker-threads=%d" (int64 $s.workers))
  "--strict-topology=false"
  "--immediate-topology=false"
  "--extra-create-metadata" -}}
{{- $env := "" -}}
{{- if .Values.storageCapacity.enabled -}}
{{- $args = concat $args (list
  "--enable-capacity"
  (printf "--capacity-ownerref-level=%d" (ternary 1 2 (eq .Values.shape "oneNode")))
  (printf "--capacity-poll-interval=%s" .Values.storageCapacity.pollInterval)
  (printf "--capacity-threads=%d" (int64 $s.capacityWorkers))
  (printf "--kube-api-capacity-qps=%v" $s.capacityQPS)
  (printf "--kube-api-capacity-burst=%d" (int64 $s.capacityBurst))) -}}
{{- $env = include "trivet.ownerEnv" . -}}
{{- end -}}
{{- include "trivet.clusterSidecar" (dict "root" . "name" "provisioner" "title" "csi-provisioner" "args" $args "env" $env) -}}
{{- end -}}

{{/* The environment in which csi-provisioner finds its own pod. The DaemonSet of the pod, or the
Deployment of the pod's ReplicaSet, owns the capacity objects. */}}
{{- define "trivet.ownerEnv" -}}
- name: NAMESPACE
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
{{- end -}}

{{- define "trivet.attacherContainer" -}}
{{- $args := list (printf "--worker-threads=%d" (int64 .Values.sidecars.attacher.workers)) -}}
{{- include "trivet.clusterSidecar" (dict "root" . "name" "attacher" "title" "csi-attacher" "args" $args) -}}
{{- end -}}

{{/* --handle-volume-inuse-error=false: the driver expands volumes that are in use, so csi-resizer need
not watch all pods of the cluster. */}}
{{- define "trivet.resizerContainer" -}}
{{- $args := list (printf "--workers=%d" (int64 .Values.sidecars.resizer.workers)) "--handle-volume-inuse-error=false" -}}
{{- include "trivet.clusterSidecar" (dict "root" . "name" "resizer" "title" "csi-resizer" "args" $args) -}}
{{- end -}}

{{- define "trivet.snapshotterContainer" -}}
{{- $args := list (printf "--worker-threads=%d" (int64 .Values.sidecars.snapshotter.workers)) "--extra-create-metadata" -}}
{{- $gates := ternary (list "CSIVolumeGroupSnapshot=true") list .Values.snapshots.groups -}}
{{- include "trivet.clusterSidecar" (dict "root" . "name" "snapshotter" "title" "csi-snapshotter" "args" $args "gates" $gates) -}}
{{- end -}}

{{/* All replicas serve, so this sidecar has no lease. Its HTTP endpoint cannot be disabled; with the address
127.0.0.1:0 it uses no fixed port of the pod. */}}
{{- define "trivet.snapshotMetadataContainer" -}}
{{- $s := .Values.sidecars.snapshotMetadata -}}
- name: csi-snapshot-metadata
  image: {{ include "trivet.sidecarImage" (dict "root" . "name" "snapshotMetadata") }}
  imagePullPolicy: {{ .Values.sidecars.pullPolicy }}
  args:
    - --csi-address=/csi/csi.sock
    - --v={{ .Values.logLevel }}
    - --timeout={{ $s.timeout }}
    - --kube-api-qps={{ $s.kubeAPIQPS }}
    - --kube-api-burst={{ $s.kubeAPIBurst }}
    - --port={{ .Values.ports.snapshotMetadata }}
    - --tls-cert=/tls/tls.crt
    - --tls-key=/tls/tls.key
    - --http-endpoint=127.0.0.1:0
    - --disable-metrics
  {{- include "trivet.sidecarSecurity" (dict "root" . "pod" (ternary "node" "controller" (eq .Values.shape "oneNode"))) | nindent 2 }}
  ports:
    # The name of a port has at most 15 characters.
    - {name: snap-metadata, containerPort: {{ .Values.ports.snapshotMetadata }}, protocol: TCP}
  resources: {{- toYaml $s.resources | nindent 4 }}
  volumeMounts:
    - {name: plugin-dir, mountPath: /csi}
    - {name: snapshot-metadata-tls, mountPath: /tls, readOnly: true}
    {{- include "trivet.tokenMount" . | nindent 4 }}
{{- end -}}

{{- define "trivet.snapshotMetadataVolume" -}}
- name: snapshot-metadata-tls
  projected:
    defaultMode: 0400
    sources:
      - secret:
          name: {{ toYaml .Values.snapshots.metadata.secretName }}
          items: [{key: tls.crt, path: tls.crt}, {key: tls.key, path: tls.key}]
{{- end -}}

{{- define "trivet.controllerSidecars" -}}
{{ include "trivet.provisionerContainer" . }}
{{- if .Values.attachRequired }}
{{ include "trivet.attacherContainer" . }}
{{- end }}
{{ include "trivet.resizerContainer" . }}
{{- if .Values.snapshots.enabled }}
{{ include "trivet.snapshotterContainer" . }}
{{- end }}
{{- if .Values.snapshots.metadata.enabled }}
{{ include "trivet.snapshotMetadataContainer" . }}
{{- end }}
{{- end -}}

{{- define "trivet.nodeVolumes" -}}
- name: plugin-dir
  hostPath: {path: {{ clean .Values.kubeletDir }}/plugins/{{ .Values.driverName }}, type: DirectoryOrCreate}
- name: registration-dir
  hostPath: {path: {{ clean .Values.kubeletDir }}/plugins_registry, type: Directory}
# The type is not DirectoryOrCreate, because a wrong path must be an error.
- name: kubelet-dir
  hostPath: {path: {{ clean .Values.kubeletDir }}, type: Directory}
- name: dev
  hostPath: {path: /dev, type: Directory}
- name: cgroup
  hostPath: {path: /sys/fs/cgroup, type: Directory}
- name: state-dir
  hostPath: {path: {{ clean .Values.stateDir }}, type: DirectoryOrCreate}
{{- range $i, $dir := include "trivet.poolMounts" . | fromJsonArray }}
- name: pool-{{ $i }}
  hostPath: {path: {{ $dir }}, type: DirectoryOrCreate}
{{- end }}
{{- if include "trivet.volumeGroups" . }}
- name: lvm-locks
  hostPath: {path: /run/lock/lvm, type: DirectoryOrCreate}
{{- end }}
- name: config
  configMap: {name: {{ include "trivet.node" . }}-config, defaultMode: 0444}
{{ include "trivet.tokenVolume" . }}
{{- if and (eq .Values.shape "oneNode") .Values.snapshots.metadata.enabled }}
{{ include "trivet.snapshotMetadataVolume" . }}
{{- end }}
{{- end -}}

{{- define "trivet.controllerVolumes" -}}
- name: plugin-dir
  emptyDir: {}
# The state directory contains the controller's certificate and its key, which need not outlive the
# pod.
- name: state-dir
  emptyDir: {medium: Memory, sizeLimit: 16Mi}
- name: config
  configMap: {name: {{ include "trivet.controller" . }}-config, defaultMode: 0444}
{{ include "trivet.tokenVolume" . }}
{{- if .Values.snapshots.metadata.enabled }}
{{ include "trivet.snapshotMetadataVolume" . }}
{{- end }}
{{- end -}}
