{{- define "rlightning.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* What names begin with: short enough for the longest suffix. */}}
{{- define "rlightning.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains (include "rlightning.name" .) .Release.Name }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "rlightning.name" .) | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* What cluster-wide names begin with: two releases in two namespaces do not meet. */}}
{{- define "rlightning.clusterName" -}}
{{- $name := include "rlightning.fullname" . }}
{{- if .Values.watchNamespaces }}{{ printf "%s-%s" $name .Release.Namespace | trunc 50 | trimSuffix "-" }}{{ else }}{{ $name }}{{ end }}
{{- end }}

{{- define "rlightning.operatorAccount" -}}
{{- default (ternary (printf "%s-operator" (include "rlightning.fullname" .)) "default" .Values.operator.serviceAccount.create) .Values.operator.serviceAccount.name }}
{{- end }}

{{- define "rlightning.statusAccount" -}}
{{- default (ternary (printf "%s-status" (include "rlightning.fullname" .)) "default" .Values.statusService.serviceAccount.create) .Values.statusService.serviceAccount.name }}
{{- end }}

{{/* Labels that select pods; call with (dict "root" . "component" "operator"). */}}
{{- define "rlightning.selector" -}}
app.kubernetes.io/name: {{ include "rlightning.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "rlightning.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/part-of: rlightning
{{ include "rlightning.selector" . }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* repository:tag or repository@digest; call with (dict "root" . "image" .Values.image "value" "image" "target" "operator"). */}}
{{- define "rlightning.image" -}}
{{- $remedy := printf "%s.repository is empty: build the target %s of the Dockerfile, push it, and name it, as in --set %s.repository=REGISTRY/rlightning-%s" .value .target .value .target }}
{{- $repository := required $remedy .image.repository }}
{{- if .image.digest }}
{{- printf "%s@%s" $repository .image.digest }}
{{- else }}
{{- printf "%s:%s" $repository (default .root.Chart.AppVersion .image.tag) }}
{{- end }}
{{- end }}
